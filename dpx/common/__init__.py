"""What the papers share: DP-SGD, two other ways to clip, masks, trainable layers, and the printed pipeline."""
