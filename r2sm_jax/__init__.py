"""Text-guided segmentation that knows which mask you mean: modal (visible) or amodal (complete)."""
