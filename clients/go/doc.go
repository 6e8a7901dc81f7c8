/*
Package fastps trains on a fastps parameter server: it holds the weights of a model on the servers of a cluster, to
which any number of workers, in any language, push gradients.

	client, err := fastps.Connect(ctx, []string{"127.0.0.1:7070"}, fastps.Options{})
	if err != nil {
		return err
	}
	defer client.Close()
	sgd := fastps.Optimizer{Name: "sgd", Settings: map[string]float64{"lr": 0.1}}
	_, err = client.Register(ctx, fastps.Tensor{Name: "w", Shape: []int{3}, Optimizer: sgd}, make([]float32, 3))
	...
	gradients := []fastps.Gradient{{Tensor: "w", Values: []float32{1, 2, 3}}}
	receipts, err := client.Push(ctx, gradients, fastps.PushOptions{})
	...
	pulled, err := client.Pull(ctx, "w")

It speaks plain gRPC, as protos/README.md describes it. A [Client] keeps one stream to each server, renews its sessions
in the background, and connects again after a failure. Programs in examples/ are complete: examples/logistic trains
logistic regression beside a Python worker on the same tensor.

The module's path has no public address yet: a program uses the module from a checkout, by go.work

	go work init . ../fastps/clients/go

or by a line in its go.mod, where CHECKOUT is the checkout:

	replace fastps.example/go => CHECKOUT/clients/go

A client that pushes gradients or joins a group is a worker, and reports its steps to shard 0, which "fastps status" and
metrics show: a step is an [Client.Advance], or else a push.

Where servers ask for tokens, [Options.TokenFile] names the file with one. The client reads it again for each new
connection.

Where servers keep history, [PushOptions.Note] says what a push came from, and [Client.Mark] names a moment to go back to.

# Failures

Every call ends with its context, or after [Options.Timeout] if that has no deadline. While a call lasts, a push whose
answer is missing is sent again under its identity, which servers apply once. After that it is never sent again: the
error is a [PartialPush] with one [Doubt] per slice, whose outcome the client finds out in the background.

[Connect] waits for servers that are not there yet. Where no retry can help (an address that is none, a web server, plain
text or TLS where the server has the other, a certificate of another name) it fails at once.

Errors are [Error] values with a [Kind], and have a code of gRPC ([status.Code]); use [errors.As]:

	var refused *fastps.Error
	if errors.As(err, &refused) && refused.Kind == fastps.StalePush {
		// pull again
	}

A VersionsLost error is raised once, by the next call, after a server restarted without changes that it had
acknowledged. A Fenced error ends the client: the tensors are gone.
[status.Code]: https://pkg.go.dev/google.golang.org/grpc/status#Code
*/
package fastps
