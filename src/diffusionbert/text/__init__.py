"""From files to rows of token ids, and back: strings stop here."""
