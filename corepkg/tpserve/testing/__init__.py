"""What plugin authors and our own tests share: contract tests, fakes and small models."""
