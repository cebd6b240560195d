"""That a deprecation of what we call fails a test."""

import warnings

import pytest


def test_a_deprecation_fails_a_test():
    with pytest.raises(DeprecationWarning, match="on its way out"):
        warnings.warn("on its way out", DeprecationWarning, stacklevel=1)
