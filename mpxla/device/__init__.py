"""What runs programs: one backend of XLA, chosen when a job starts."""
