"""KV pages of sequences leave a worker and come to it: in shared memory, or over a link to another host."""
