"""The page that `menet serve` shows and `menet explore` exports: `explorer` computes, `server` serves."""
