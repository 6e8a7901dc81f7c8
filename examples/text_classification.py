"""Text classification: two lock-free threads train a scikit-learn pipeline.

Needs the extra sklearn.

    python examples/text_classification.py

The texts are synthetic: words of two topics among neutral words.
"""

import random

from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline

from fastps.hogwild import HogwildClassifier

TOPICS = {
    "ships": ["harbour", "anchor", "sail", "tide", "captain", "deck", "mast", "crew", "storm"],
    "gardens": [
        "soil",
        "seed",
        "bloom",
        "pruning",
        "hedge",
        "rose",
        "compost",
        "lawn",
        "greenhouse",
        "spade",
    ],
}
OTHERS = [f"word{k}" for k in range(2000)]


def texts(count: int, chance: random.Random) -> tuple[list[str], list[str]]:
    """Short texts with two words of their topic, and sometimes one of the other."""
    names = list(TOPICS)
    made, labels = [], []
    for _ in range(count):
        topic, other = chance.sample(names, 2)
        words = chance.choices(OTHERS, k=30) + chance.choices(TOPICS[topic], k=2)
        if chance.random() < 0.3:
            words.append(chance.choice(TOPICS[other]))
        chance.shuffle(words)
        made.append(" ".join(words))
        labels.append(topic)
    return made, labels


documents, labels = texts(5000, random.Random(0))
train, test, train_labels, test_labels = train_test_split(documents, labels, random_state=0)

model = make_pipeline(
    HashingVectorizer(n_features=2**16, dtype="float32"),
    HogwildClassifier(loss="log_loss", alpha=1e-4, n_jobs=2, random_state=0),
)
model.fit(train, train_labels)

print(f"accuracy {model.score(test, test_labels):.3f}")
print(f"log-loss {log_loss(test_labels, model.predict_proba(test)):.3f}")
print(model.predict(["the captain went on deck in the storm", "a rose in good soil"]))
