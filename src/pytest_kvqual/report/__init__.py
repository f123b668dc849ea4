"""Views of verdicts and receipts: nothing here decides."""
