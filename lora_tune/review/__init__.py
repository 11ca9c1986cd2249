"""What a person looks at: live screen, report, dashboard."""
