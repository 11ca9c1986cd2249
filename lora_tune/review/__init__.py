"""Views of a sweep: live screen, report, figures, advice."""
