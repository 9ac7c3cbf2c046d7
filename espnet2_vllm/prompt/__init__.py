"""From what users write (messages, Kaldi entries) to the rows that a checkpoint was trained on."""
