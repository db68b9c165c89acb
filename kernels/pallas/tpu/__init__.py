"""Flash attention for TPUs, in Pallas on Mosaic."""
