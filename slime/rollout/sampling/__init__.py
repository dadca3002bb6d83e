"""From one prompt to scored samples: requests to engines, generate functions, rewards, versions of weights."""
