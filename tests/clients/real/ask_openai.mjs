// openai for node: a chat and its stream, an object by a schema, tools that are run, and the same of responses.
import OpenAI from 'openai';
import { zodResponseFormat, zodTextFormat } from 'openai/helpers/zod';
import { z } from 'zod';

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0 });
const report = (name, value) => console.log('RESULT', JSON.stringify({ name, value }));
const messages = [{ role: 'user', content: 'Name a sea.' }];
const Sea = z.object({ salty: z.boolean(), depth_m: z.number().int() });
const limits = { model, temperature: 0 };

const chat = await client.chat.completions.create({ ...limits, messages, max_completion_tokens: 40 });
report('chat', chat.choices[0].message.content);
let text = '';
const stream = await client.chat.completions.create({
  ...limits, messages, max_completion_tokens: 40, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? '';
report('chat streamed', text);
const parsed = await client.chat.completions.parse({ ...limits, messages, response_format: zodResponseFormat(Sea, 'sea') });
report('chat object', parsed.choices[0].message.parsed);
let calls = 0;
const runner = client.chat.completions.runTools({
  ...limits, messages, max_completion_tokens: 60, stream: true,
  tools: [{ type: 'function', function: {
    name: 'get_weather', parse: JSON.parse, function: () => { calls += 1; return 'rain'; },
    parameters: { type: 'object', properties: { warm: { type: 'boolean' } }, required: ['warm'] },
  } }],
  tool_choice: { type: 'function', function: { name: 'get_weather' } },
}, { maxChatCompletions: 2 });
await runner.done();
report('chat calls', calls);
const response = await client.responses.create({ ...limits, input: 'Name a sea.', max_output_tokens: 40 });
report('responses', response.output_text);
text = '';
for await (const event of await client.responses.create({ ...limits, input: 'Name a sea.', max_output_tokens: 40, stream: true }))
  if (event.type === 'response.output_text.delta') text += event.delta;
report('responses streamed', text);
const typed = await client.responses.parse({ ...limits, input: 'Name a sea.', text: { format: zodTextFormat(Sea, 'sea') } });
report('responses object', typed.output_parsed);
