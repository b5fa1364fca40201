"""Small models, pretrained by the project itself."""
