"""metrics.py <FILE: whether a text is what a collector of Prometheus takes (text format 0.0.4): each family once and in one
piece, with its type before it, each series once, labels that end, histograms whose buckets grow. Says what is wrong, or how many
series there are."""
import re
import sys

LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(%s(?:,%s)*)\})? (\S+)' % (LABEL, LABEL))
types, helped, series, closed, buckets = {}, set(), set(), set(), {}
family = None


def wrong(why):
    sys.exit("line %d: %s: %s" % (number, why, line))


for number, line in enumerate(sys.stdin.read().split("\n"), 1):
    if line.startswith("# HELP "):
        name = line.split(" ", 3)[2]
        if name in helped or name in types:
            wrong("a family is described twice, or after its type")
        helped.add(name)
    elif line.startswith("# TYPE "):
        _, _, name, kind = line.split(" ", 3)
        if name in types or kind not in ("counter", "gauge", "histogram"):
            wrong("a type is there twice, or is none")
        types[name] = kind
    elif line:
        found = SAMPLE.fullmatch(line)
        if not found:
            wrong("no sample")
        name, labels, value = found.groups()
        base = name if name in types else re.sub("_(bucket|sum|count)$", "", name)
        if base not in types:
            wrong("no type")
        if base in closed:
            wrong("a family in several pieces")
        if base != family:
            closed.add(family)
            family = base
        if (name, labels) in series:
            wrong("a series twice")
        series.add((name, labels))
        value = float(value)
        if types[base] == "histogram" and name.endswith("_bucket"):
            bound = float(re.search(r'le="([^"]*)"', labels)[1])
            rest = re.sub(r',?le="[^"]*"', "", labels)
            before = buckets.get(rest, (-1.0, -1.0))
            if bound <= before[0] or value < before[1]:
                wrong("a bucket below the one before")
            buckets[rest] = (bound, value)
if set(types) - helped:
    sys.exit("no help for %s" % sorted(set(types) - helped))
print("%d series" % len(series))
