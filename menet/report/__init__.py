"""Reports: tables, figures and sentences as pure functions of records, on one HTML page."""
