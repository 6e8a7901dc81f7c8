"""A recommender: two lock-free threads train factors on a sparse matrix of ratings.

Needs the extra sklearn.

    python examples/recommender.py

The ratings are synthetic: 1,000 people rate 40 of 400 films each, according to hidden tastes.
"""

import numpy as np
import scipy.sparse

from fastps.hogwild import HogwildMatrixFactorization

rng = np.random.default_rng(0)
people, films, each = 1000, 400, 40
tastes = rng.standard_normal((people, 4)) @ rng.standard_normal((4, films)) / 2 + 3.5

users = np.repeat(np.arange(people), each)
items = np.concatenate([rng.choice(films, each, replace=False) for _ in range(people)])
ratings = np.clip(tastes[users, items] + 0.3 * rng.standard_normal(len(users)), 0.5, 5).astype(np.float32)

known = rng.random(len(users)) < 0.9
matrix = scipy.sparse.csr_matrix((ratings[known], (users[known], items[known])), shape=(people, films))
model = HogwildMatrixFactorization(8, learning_rate=0.03, max_iter=40, n_jobs=2, random_state=0).fit(matrix)

pairs = np.column_stack([users, items])[~known]
error = np.sqrt(np.mean((model.predict(pairs) - ratings[~known]) ** 2))
print(f"RMSE {error:.3f} (predicting the mean: {np.std(ratings[~known]):.3f})")

best, scores = model.recommend(0, 5, exclude=matrix[0].indices)
for film, score in zip(best, scores, strict=True):
    print(f"film {film}: {score:.1f}")

# New ratings, by a new person.
model.partial_fit(np.array([[people, 7], [people, 9]]), np.array([5.0, 1.0]))
print("now", len(model.user_biases_), "people")
