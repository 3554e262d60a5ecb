"""From a trained generator to files of images, and from these to scores."""
