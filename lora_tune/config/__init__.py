"""Study and site files, search space, layouts."""
