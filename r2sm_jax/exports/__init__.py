"""An export is a folder in Hugging Face's layout that holds a trained segmenter and all that it takes to use it."""
