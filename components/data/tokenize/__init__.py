"""Tokenise samples into token ids and masks."""
