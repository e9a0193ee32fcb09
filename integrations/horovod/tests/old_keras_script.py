"""Training scripts as they were written for Horovod's two Keras modules; nothing here knows of hvdp."""

import sys

if sys.argv[1] == "tensorflow.keras":
    import horovod.tensorflow.keras as hvd
    from horovod.tensorflow.keras.callbacks import LearningRateWarmupCallback
else:
    import horovod.keras as hvd
    from horovod.keras.callbacks import LearningRateWarmupCallback
import keras
import numpy as np

hvd.init()
keras.utils.set_random_seed(17 + hvd.rank())
everywhere = np.random.default_rng(3)
inputs = everywhere.normal(size=(256, 8)).astype("float32")
targets = (inputs @ everywhere.normal(size=(8, 1))).astype("float32")
inputs, targets = inputs[hvd.rank() :: hvd.size()], targets[hvd.rank() :: hvd.size()]

model = keras.Sequential([keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.02 * hvd.size(), momentum=0.9)
# Up to `op` both modules have the same parameters in the same order.
optimizer = hvd.DistributedOptimizer(optimizer, None, "", "", hvd.Compression.fp16, False, 1.0, hvd.Average)
model.compile(loss="mse", optimizer=optimizer, metrics=["mae"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    LearningRateWarmupCallback(initial_lr=0.02 * hvd.size(), warmup_epochs=2, verbose=0),
]
history = model.fit(inputs, targets, batch_size=16, epochs=4, callbacks=callbacks, verbose=0).history

weights = np.concatenate([weight.reshape(-1) for weight in model.get_weights()])
everyones = hvd.allgather(weights[None], name="weights")
same = bool((everyones == everyones[:1]).all())
losses = hvd.allgather(np.array([history["loss"][-1]]))
if hvd.rank() == 0:
    falls = history["loss"][-1] < history["loss"][0] / 2
    print(f"ranks {hvd.size()} same {same} losses {len(set(losses.tolist()))} falls {falls}")
