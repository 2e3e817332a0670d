"""Messages to the user: notices, progress, suggestions for names, terms by caller, safe text."""
