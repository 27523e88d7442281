"""Agents of Python libraries, each with one tool, ``shell``. ``NAME: what an ordinary user of the library writes``.

    python library_agents.py NAME <task

The process fails if the agent's answer is not that of the test's script. With ``CHOICES`` in the environment the
arguments of calls are choices, so that each forced call of a model that cannot write is one of the script's.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any, Literal

URL, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
MODEL, WINDOW = os.environ["AGENT_RL_MODEL"], int(os.environ["AGENT_RL_CONTEXT_WINDOW"])
CHOICES = "CHOICES" in os.environ
Command = Literal["ls", "echo 'a b' >made.txt"] if CHOICES else str
Text = Literal["Done."] if CHOICES else str


def shell(command: Command) -> str:
    """Runs a command.

    Args:
        command: the command
    """
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


shell.__annotations__ = {"command": Command, "return": str}  # llama-index does not resolve names


def smolagents_code(task: str) -> object:
    from smolagents import CodeAgent, OpenAIServerModel, tool

    model = OpenAIServerModel(MODEL, api_base=URL, api_key=KEY)
    return CodeAgent(tools=[tool(shell)], model=model, max_steps=5).run(task)


def smolagents_calls(task: str) -> object:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(MODEL, api_base=URL, api_key=KEY)

    def final_answer(answer: Text) -> str:
        """Ends the task.

        Args:
            answer: the answer
        """
        return answer

    own = [tool(final_answer)] if CHOICES else []
    return ToolCallingAgent(tools=[tool(shell), *own], model=model, max_steps=5).run(task)


def pydantic_ai(task: str) -> object:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel

    agent = Agent(OpenAIChatModel(MODEL))
    agent.tool_plain(shell)
    return agent.run_sync(task).output


def pydantic_ai_output(task: str) -> object:
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel

    class Answer(BaseModel):
        text: Text

    agent = Agent(OpenAIChatModel(MODEL), output_type=Answer)
    agent.tool_plain(shell)
    return agent.run_sync(task).output.text


def openai_agents(task: str) -> object:
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    agent = Agent(name="agent", instructions="Work.", tools=[function_tool(shell)], model=MODEL)
    return Runner.run_sync(agent, task).final_output


def langgraph(task: str) -> object:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    return _last(create_react_agent(ChatOpenAI(model=MODEL), tools=[shell]), task)


def langchain(task: str) -> object:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    return _last(create_agent(ChatOpenAI(model=MODEL), tools=[shell]), task)


def langchain_output(task: str) -> object:
    from langchain.agents import create_agent
    from langchain.agents.structured_output import ToolStrategy
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Answer(BaseModel):
        text: Text

    agent: Any = create_agent(ChatOpenAI(model=MODEL), tools=[shell], response_format=ToolStrategy(Answer))
    return agent.invoke({"messages": [("user", task)]})["structured_response"].text


def deepagents(task: str) -> object:
    from deepagents import create_deep_agent
    from langchain_openai import ChatOpenAI

    return _last(create_deep_agent(model=ChatOpenAI(model=MODEL), tools=[shell]), task)


def _last(agent: Any, task: str) -> object:
    return agent.invoke({"messages": [("user", task)]})["messages"][-1].content


def autogen(task: str) -> object:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core.tools import FunctionTool
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info: Any = {"vision": False, "function_calling": True, "json_output": False, "family": "unknown"}
    info["structured_output"] = False
    client = OpenAIChatCompletionClient(model=MODEL, base_url=URL, api_key=KEY, model_info=info)

    tool = FunctionTool(shell, description="Runs a command.")
    agent = AssistantAgent("agent", client, tools=[tool], max_tool_iterations=5)
    last: Any = asyncio.run(agent.run(task=task)).messages[-1]
    return last.content


def agno(task: str) -> object:
    from agno.agent import Agent
    from agno.models.openai.like import OpenAILike

    model = OpenAILike(id=MODEL, base_url=URL, api_key=KEY)
    return Agent(model=model, tools=[shell], telemetry=False).run(task).content


def llama_index(task: str) -> object:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=MODEL,
        api_base=URL,
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=WINDOW,
    )

    async def run() -> object:
        return await FunctionAgent(tools=[shell], llm=model, streaming=False).run(task)

    return asyncio.run(run())


def strands(task: str) -> object:
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    model = OpenAIModel(client_args={"base_url": URL, "api_key": KEY}, model_id=MODEL)
    return Agent(model=model, tools=[tool(shell)], callback_handler=None)(task)


def haystack(task: str) -> object:
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function

    agent = Agent(
        chat_generator=OpenAIChatGenerator(model=MODEL, api_base_url=URL), tools=[create_tool_from_function(shell)]
    )
    return agent.run(messages=[ChatMessage.from_user(task)])["messages"][-1].text


def semantic_kernel(task: str) -> object:
    from openai import AsyncOpenAI
    from semantic_kernel.agents import ChatCompletionAgent
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
    from semantic_kernel.functions import kernel_function

    class Tools:
        @kernel_function(name="shell", description="Runs a command.")
        def run(self, command: str) -> str:
            return shell(command)

    service = OpenAIChatCompletion(ai_model_id=MODEL, async_client=AsyncOpenAI())
    agent = ChatCompletionAgent(service=service, name="agent", plugins=[Tools()])
    return asyncio.run(agent.get_response(messages=task)).content


def agent_framework(task: str) -> object:
    from agent_framework import Agent
    from agent_framework.openai import OpenAIChatCompletionClient

    agent = Agent(client=OpenAIChatCompletionClient(model=MODEL, api_key=KEY, base_url=URL), tools=[shell])
    return asyncio.run(agent.run(task)).text


def crewai(task: str) -> object:
    from crewai import LLM, Agent
    from crewai.tools import tool

    model = LLM(model=f"openai/{MODEL}", base_url=URL, api_key=KEY)
    return Agent(role="agent", goal="work", backstory="none", llm=model, tools=[tool(shell)]).kickoff(task).raw


def google_adk(task: str) -> object:
    from google.adk.agents import LlmAgent
    from google.adk.models.lite_llm import LiteLlm
    from google.adk.runners import InMemoryRunner

    agent = LlmAgent(name="agent", model=LiteLlm(model=f"openai/{MODEL}"), tools=[shell])
    events = asyncio.run(InMemoryRunner(agent=agent).run_debug(task, quiet=True))
    return events[-1].content.parts[-1].text


def openhands(task: str) -> object:
    from openhands.sdk import LLM, Agent, Conversation, Tool
    from openhands.sdk.conversation.response_utils import get_agent_final_response
    from openhands.tools.terminal import TerminalTool
    from pydantic import SecretStr

    llm = LLM(model=f"openai/{MODEL}", base_url=URL, api_key=SecretStr(KEY), max_input_tokens=WINDOW)
    conversation = Conversation(Agent(llm=llm, tools=[Tool(name=TerminalTool.name)]), workspace=os.getcwd())
    conversation.send_message(task)
    conversation.run()
    return get_agent_final_response(conversation.state.events)


def dspy(task: str) -> object:
    import dspy

    dspy.configure(lm=dspy.LM(f"openai/{MODEL}", api_base=URL, api_key=KEY, cache=False))
    return dspy.ReAct("task -> answer", tools=[shell], max_iters=5)(task=task).answer


if __name__ == "__main__":
    answer = str(globals()[sys.argv[1]](sys.stdin.read())).strip()
    sys.exit(0 if answer == "Done." else f"the answer is {answer!r}")
