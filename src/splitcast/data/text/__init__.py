"""Texts: documents, tokens, and the sequences that are learned from.

packages.py   texts and a model by package name, for `splitcast data get`
corpus.py     documents out of files and folders
located.py    models of transformers: files, folders, and names of the hub
tokens.py     tokenizers, and documents as tokens
sequences.py  documents as a data set
gguf.py       a model file as configuration, weights and tokenizer
"""
