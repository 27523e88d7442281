"""The APIs of agent programs: OpenAI chat completions and Responses, and Anthropic Messages."""
