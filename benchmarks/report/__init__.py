"""From records to the page of the documentation."""
