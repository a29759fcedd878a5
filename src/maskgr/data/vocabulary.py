"""The invented brands, categories and words of the generated shop."""

from __future__ import annotations

import numpy as np

# The first block lists the product lines. Each further block is a department: its name and brands,
# features, variants, then a line per category with its leaves and their usual prices. The order of
# the leaves matters: each leaf complements the one before it (a sleeping bag after a tent).
VOCABULARY = """\
Alpha Classic Studio Pro Air Heritage Urban Essential Plus Signature Prime Nova

Outdoor: Norvik Tarnhult Skarrafell Ridgemoor Pinevolt Brackwyn Fjordane Windhollow
Lightweight Waterproof Insulated Foldable Breathable Rugged Reflective Windproof
Blue Olive Orange Graphite Sand Red Teal Black
Camping: Dome Tent 180, Sleeping Bag 90, Camp Stove 45
Hiking: Hiking Boots 130, Trekking Poles 60, Daypack 70
Cycling: Bike Helmet 65, Cycling Gloves 25, Bike Light 30
Paddling: Inflatable Kayak 320, Kayak Paddle 55, Dry Bag 22

Kitchen: Maroquel Bellatorre Kopparhus Finchbury Brunavo Zestara Hearthwick Culindra
Non-Stick Dishwasher-Safe Compact Stainless Quiet Ergonomic Heatproof Handmade
Copper Cream Charcoal Sage White Steel Burgundy Walnut
Coffee: Espresso Machine 260, Coffee Grinder 80, Milk Frother 28
Baking: Stand Mixer 240, Cake Tin 16, Rolling Pin 14
Cooking: Frying Pan 48, Chef Knife 62, Cutting Board 26
Tea: Electric Kettle 45, Teapot 34, Tea Infuser 9

Electronics: Zentovo Quarrix Lumetra Pixanor Voltessa Heliodyne Nexaril Oktavio
Rechargeable Ultra-Thin Low-Latency Shockproof Fast-Charging Modular Silent Slim
Black Silver White Midnight Gunmetal Champagne Green Violet
Computing: Laptop 900, Laptop Sleeve 30, Wireless Mouse 35
Audio: Headphones 150, Headphone Stand 25, Bluetooth Speaker 85
Photography: Mirrorless Camera 780, Camera Lens 340, Tripod 75
Gaming: Game Console 380, Game Controller 55, Charging Dock 32

Beauty: Aurelisse Botaniqua Velmira Solenkay Dewmarsh Lunabel Corvanne Petalune
Nourishing Fragrance-Free Hydrating Vegan Gentle Long-Lasting Organic Soothing
Rose Lavender Almond Citrus Coconut Honey Mint Vanilla
Hair Care: Shampoo 11, Conditioner 12, Hair Mask 18
Skin Care: Face Cleanser 16, Facial Toner 15, Moisturiser 24
Make-Up: Foundation 28, Mascara 17, Lipstick 15
Shaving: Safety Razor 32, Shaving Cream 10, Aftershave 21

Garden: Greenholt Mossbury Terrafolk Hedgelane Sunnavik Bramblecote Rootwell Arborine
Weatherproof Rust-Free Recycled Heavy-Duty Frost-Proof Natural Stackable Robust
Terracotta Green Slate Oak Anthracite Ivory Bronze Moss
Planting: Plant Pot 14, Potting Soil 9, Watering Can 19
Lawn: Lawn Mower 290, Grass Seed 15, Leaf Rake 24
Barbecue: Charcoal Grill 160, Grill Tongs 15, Grill Cover 29
Patio: Garden Bench 140, Bench Cushion 36, Patio Lantern 27"""
[LINES], *BLOCKS = (block.splitlines() for block in VOCABULARY.split("\n\n"))
DEPARTMENTS = np.array([head.split(": ")[0] for head, *_ in BLOCKS])
# (departments, 8) each: every department has the same number of brands, features and variants
BRANDS = np.array([head.split(": ")[1].split() for head, *_ in BLOCKS])
FEATURES, VARIANTS = (np.array([block[line].split() for block in BLOCKS]) for line in (1, 2))
LEAVES = [
    (department, category, *entry.rsplit(" ", 1))
    for department, block in enumerate(BLOCKS)
    for category, shelf in (line.split(": ") for line in block[3:])
    for entry in shelf.split(", ")
]
DEPARTMENT, CATEGORY, NAME, PRICE = map(np.array, zip(*LEAVES, strict=True))  # (leaves,) each
