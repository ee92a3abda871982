"""Reports: tables and figures as pure functions of records, and one HTML file that holds them all."""
