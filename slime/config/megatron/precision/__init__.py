"""Which linear layers compute in fewer bits than 16, and what of it a run refuses."""
