"""Answers in Redis or Valkey, by redis-py. Each question is one script, so that the bounds hold for all daemons."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import BlockingConnectionPool, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from device_profiles.units import MS_PER_S
from orchestrator.config.draft_store import DraftStoreOptions, read_password
from orchestrator.daemon.draft_store.port import Entry, StoreFailed, StoreRefused
from orchestrator.errors import ConfigError

PREFIX = "outrider:{drafts}:1:"
"""What every key of ours begins with; the braces keep them in one slot of a cluster."""
LATEST_OF_BLOCK = 4
"""Answers that a block leads to: the latest ones. ADR 0072. Not tuned."""
_CONNECTIONS = 8  # questions to Redis at a time; more wait. Not tuned.

# ARGV: prefix, least shared blocks, most answers, block... Returns values.
_FIND = """
local votes, order = {}, {}
for at = 4, #ARGV do
  local found = redis.pcall('LRANGE', ARGV[1] .. 'b:' .. ARGV[at], 0, -1)
  if not found.err then
    for age, id in ipairs(found) do
      if not votes[id] then votes[id] = {0, age}; order[#order + 1] = id end
      votes[id][1] = votes[id][1] + 1
    end
  end
end
table.sort(order, function(one, two)
  if votes[one][1] ~= votes[two][1] then return votes[one][1] > votes[two][1] end
  if votes[one][2] ~= votes[two][2] then return votes[one][2] < votes[two][2] end
  return one < two
end)
local values = {}
for _, id in ipairs(order) do
  if #values >= tonumber(ARGV[3]) or votes[id][1] < tonumber(ARGV[2]) then break end
  local value = redis.pcall('GET', ARGV[1] .. 'a:' .. id)
  if type(value) == 'string' then values[#values + 1] = value end
end
return values
"""

# ARGV: prefix, id, value, milliseconds to keep, most answers, most bytes, latest of a block, block...
_KEEP = """
local prefix, id, value, keep_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local order, known, total = prefix .. 'order', prefix .. 'known', prefix .. 'bytes'
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
if #value > tonumber(ARGV[6]) then return 0 end
-- The first write is one that Redis refuses where its memory is full; behind another it would let it pass.
redis.call('SET', prefix .. 'a:' .. id, value, 'PX', keep_ms)
local function forget(one)
  local told = redis.call('HGET', known, one)
  if told then
    local size, blocks = string.match(told, '^(%d+):(.*)$')
    if size then
      redis.call('INCRBY', total, -tonumber(size))
      for block in string.gmatch(blocks, '[^,]+') do redis.pcall('LREM', prefix .. 'b:' .. block, 0, one) end
    end
    redis.call('HDEL', known, one)
  end
  redis.call('ZREM', order, one)
  if one ~= id then redis.call('DEL', prefix .. 'a:' .. one) end
end
forget(id)
for _, one in ipairs(redis.call('ZRANGEBYSCORE', order, '-inf', now_ms - keep_ms, 'LIMIT', 0, 100)) do forget(one) end
while true do
  local count, bytes = redis.call('ZCARD', order), tonumber(redis.call('GET', total) or '0')
  if count == 0 then redis.call('DEL', total, known) break end
  if count < tonumber(ARGV[5]) and bytes + #value <= tonumber(ARGV[6]) then break end
  forget(redis.call('ZRANGE', order, 0, 0)[1])
end
local blocks = {}
for at = 8, #ARGV do
  local key = prefix .. 'b:' .. ARGV[at]
  blocks[#blocks + 1] = ARGV[at]
  if type(redis.pcall('LPUSH', key, id)) == 'table' then
    redis.call('DEL', key)
    redis.call('LPUSH', key, id)
  end
  redis.call('LTRIM', key, 0, tonumber(ARGV[7]) - 1)
  redis.call('PEXPIRE', key, keep_ms)
end
redis.call('ZADD', order, now_ms, id)
redis.call('HSET', known, id, #value .. ':' .. table.concat(blocks, ','))
redis.call('INCRBY', total, #value)
for _, key in ipairs({order, known, total}) do redis.call('PEXPIRE', key, keep_ms + 60000) end
return 1
"""


@dataclass(frozen=True, slots=True)
class RedisPassword:
    """Where Redis' password is: a file, an environment variable, or neither."""

    file: Path | None = None
    variable: str = ""

    def read(self) -> str:
        """Return the password, "" where none is asked for. Raises ConfigError."""
        if self.file is not None:
            return read_password(self.file)
        if self.variable and not os.environ.get(self.variable):
            raise ConfigError(f"the environment variable {self.variable} is not set: it is to have Redis' password")
        return os.environ.get(self.variable, "")


class _Credentials(CredentialProvider):
    """Reads the password at each connection, so that a new one holds without a restart."""

    def __init__(self, user: str, password: RedisPassword) -> None:
        self._user, self._password = user, password

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """See redis-py. Raises redis.exceptions.ConnectionError where there is no password to read."""
        try:
            password = self._password.read()
        except ConfigError as error:
            raise RedisConnectionError(str(error)) from error
        return (self._user, password) if self._user else (password,)


class RedisDraftStore:
    """See `port.DraftStore`. `url`: without a password."""

    def __init__(self, url: str, password: RedisPassword, bounds: DraftStoreOptions) -> None:
        self._bounds, timeout_s = bounds, bounds.timeout_ms / MS_PER_S
        options: dict[str, Any] = dict(parse_url(url))
        user = options.pop("username", "")
        if user or password.file is not None or password.variable:
            options["credential_provider"] = _Credentials(user, password)
        pool = BlockingConnectionPool(
            max_connections=_CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 1),  # a connection that was lost meanwhile; what lasts is the breaker's
            **options,
        )
        self._redis = Redis.from_pool(pool)
        self._find = self._redis.register_script(_FIND)
        self._keep = self._redis.register_script(_KEEP)

    async def find_answers(self, blocks: Sequence[str], least: int, most: int) -> list[bytes]:
        values = await self._ask(self._find, [PREFIX, least, most, *blocks])
        return [value for value in values if isinstance(value, bytes)] if isinstance(values, list) else []

    async def keep(self, entry: Entry) -> None:
        bounds = self._bounds
        limits = [round(bounds.expire_s * MS_PER_S), bounds.max_entries, bounds.max_size, LATEST_OF_BLOCK]
        await self._ask(self._keep, [PREFIX, entry.entry_id, entry.value, *limits, *entry.blocks])

    async def _ask(self, script: Any, arguments: list[Any]) -> object:
        try:
            return await script(args=arguments)
        except ResponseError as error:
            raise StoreRefused(" ".join(str(error).split())) from error
        except (RedisError, OSError, TimeoutError, UnicodeError) as error:
            raise StoreFailed(" ".join(str(error).split()) or type(error).__name__) from error

    async def close(self) -> None:
        try:
            await self._redis.aclose(close_connection_pool=True)
        except (RedisError, OSError, TimeoutError):
            return
