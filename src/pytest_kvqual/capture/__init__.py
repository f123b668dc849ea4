"""Record what an arm answers. A capture never decides."""
