"""The APIs that agent programs speak: OpenAI's chat completions and Responses, and Anthropic's Messages."""
