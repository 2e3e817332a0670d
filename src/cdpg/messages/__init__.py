"""Words of messages: suggestions for names, terms by caller, safe text."""
