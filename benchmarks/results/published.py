"""What the paper reports, and nothing else: no figure of ours stands here."""

PAPER = {
    "d3pm": (82.34, 0.3897, 0.2347),
    "d3pm-tad": (125.15, 0.3390, 0.2720),
    "d3pm-spindle-paper": (77.50, 0.4241, 0.2288),
    "diffusion-lm": (118.62, 0.3553, 0.2668),
    "diffusion-lm-bert": (132.12, 0.3562, 0.2798),
    "bert-mouth": (142.89, 0.2867, 0.1240),
    "diffusionbert-lte": (92.53, 0.3995, 0.2118),
    "diffusionbert-pte": (79.95, 0.3886, 0.2156),
    "diffusionbert": (78.76, 0.4213, 0.2116),
    "diffusionbert-spindle-paper": (63.78, 0.4358, 0.2151),
}
"""Its table 2: perplexity, BLEU-4, self-BLEU-4. Its spindle rows are by its own quantity, which is no bound."""
PAPER_STEPS = {
    "diffusionbert-spindle": {2: 313.57, 8: 91.01, 16: 75.66, 64: 65.83, 128: 63.78, 512: 54.63},
    "diffusion-lm": {2000: 112.12},
    "bert-mouth": {64: 142.89, 512: 86.78},
    "decoder-pretrained": {64: 38.7},
}
"""Its table 3: perplexity over so many steps. That its DiffusionBERT has the spindle, follows from its table 2."""
