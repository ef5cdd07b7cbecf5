"""Reading one rank's share of a model's weights into the tensors that the decoder uses.

:func:`load_shard` returns a flat dictionary. All tensors have the requested dtype, lie contiguous on the requested
device, and hold only what this rank computes with: of the files, only the rows and columns of this rank are read.
With ``q``, ``kv``, ``mlp`` and ``rows`` the rank's share (``partition.q_heads.size``, ``.kv_heads.size``,
``.mlp.size``, ``.vocab_rows``) and ``N`` a layer's number from 0, the names are

=================================  ==================================  ===============================================
name                               shape                               content
=================================  ==================================  ===============================================
``embed.weight``                   [rows, hidden]                      this rank's rows of the vocabulary; zeros after
                                                                       the last valid row
``layers.N.attn_norm.weight``      [hidden]                            RMS norm before attention
``layers.N.attn.qkv.weight``       [(q + 2 kv) * head_dim, hidden]     query heads, then key heads, then value heads
``layers.N.attn.qkv.bias``         [(q + 2 kv) * head_dim]             only if ``config.qkv_bias``
``layers.N.attn.q_norm.weight``    [head_dim]                          only if ``config.qk_norm``
``layers.N.attn.k_norm.weight``    [head_dim]                          only if ``config.qk_norm``
``layers.N.attn.o.weight``         [hidden, q * head_dim]              its product is a partial sum over the ranks
``layers.N.attn.o.bias``           [hidden]                            only if ``config.o_bias``, and on rank 0 alone
``layers.N.mlp_norm.weight``       [hidden]                            RMS norm before the MLP
``layers.N.mlp.gate_up.weight``    [2 * mlp, hidden]                   gate rows, then up rows
``layers.N.mlp.gate_up.bias``      [2 * mlp]                           only if ``config.mlp_bias``
``layers.N.mlp.down.weight``       [hidden, mlp]                       its product is a partial sum over the ranks
``layers.N.mlp.down.bias``         [hidden]                            only if ``config.mlp_bias``, on rank 0 alone
``norm.weight``                    [hidden]                            RMS norm before the head
``head.weight``                    [rows, hidden]                      rows as in ``embed.weight``
=================================  ==================================  ===============================================

Biases of partial sums are on rank 0 alone because the all-reduce after the product would add them once a rank.

The embedding is split by vocabulary like the head. A rank looks up the tokens in its range, takes zeros for all
others, and one all-reduce (exact: all but one addend are zero) makes the whole; with one rank it is a plain lookup.
The other choice, a full copy on each rank, saves one all-reduce of the 2 * layers + 1 in a step and costs up to
gigabytes a rank. With tied embeddings ``head.weight`` *is* ``embed.weight``: the same tensor object, read once.

The logits of the ranks side by side, in rank order, are ``[n, size * rows]``; those from ``vocab_size`` on are padding.
"""
