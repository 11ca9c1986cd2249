"""What a user writes: study and site files, the search space, layouts."""
