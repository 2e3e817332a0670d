"""Other programs that draw samples: vLLM, as a server or inside this process."""
