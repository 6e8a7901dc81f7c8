// Command logistic trains logistic regression on a9a, beside other workers on the same tensor:
//
//	go run ./examples/logistic -servers 127.0.0.1:7070 -data a9a.gz
//
// worker.py in this folder does the same in Python; start both.
package main

import (
	"bufio"
	"compress/gzip"
	"context"
	"flag"
	"fmt"
	"log"
	"math"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"time"

	fastps "fastps.example/go"
)

const features = 124 // the first is always 1

// sample has the indices of the features that are 1, and its label, 0 or 1.
type sample struct {
	ones  []int
	label float64
}

// read parses a gzipped file in the format of LIBSVM, whose features are 1 where they are named.
func read(path string) ([]sample, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	unzipped, err := gzip.NewReader(file)
	if err != nil {
		return nil, err
	}
	var samples []sample
	for lines := bufio.NewScanner(unzipped); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		one := sample{ones: []int{0}}
		if strings.HasPrefix(fields[0], "+") {
			one.label = 1
		}
		for _, field := range fields[1:] {
			index, err := strconv.Atoi(strings.TrimSuffix(field, ":1"))
			if err != nil || index >= features {
				return nil, fmt.Errorf("%s: no feature of a9a: %q", path, field)
			}
			one.ones = append(one.ones, index)
		}
		samples = append(samples, one)
	}
	return samples, nil
}

// loss returns the mean log loss of samples, and its gradient.
func loss(w []float32, samples []sample) (float64, []float32) {
	total, gradient := 0.0, make([]float32, len(w))
	for _, s := range samples {
		z := 0.0
		for _, i := range s.ones {
			z += float64(w[i])
		}
		p := 1 / (1 + math.Exp(-z))
		total += math.Log1p(math.Exp(-math.Abs(z))) + math.Max(z, 0) - s.label*z
		for _, i := range s.ones {
			gradient[i] += float32((p - s.label) / float64(len(samples)))
		}
	}
	return total / float64(len(samples)), gradient
}

func run(servers, data string, steps, batch int) error {
	samples, err := read(data)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	client, err := fastps.Connect(ctx, strings.Split(servers, ","), fastps.Options{Name: "logistic"})
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	// The first worker registers the tensor; the others find it.
	adagrad := fastps.Optimizer{Name: "adagrad", Settings: map[string]float64{"lr": 0.1}}
	tensor := fastps.Tensor{Name: "logistic", Shape: []int{features}, Optimizer: adagrad}
	if _, err := client.Register(ctx, tensor, make([]float32, features)); err != nil {
		return err
	}
	pulled, err := client.Pull(ctx, "logistic")
	if err != nil {
		return err
	}
	for range steps {
		from := rand.IntN(len(samples) - batch)
		_, gradient := loss(pulled.Values["logistic"], samples[from:from+batch])
		push := []fastps.Gradient{{Tensor: "logistic", Values: gradient}}
		options := fastps.PushOptions{BasedOn: pulled.Versions}
		if pulled, _, err = client.PushPull(ctx, push, options); err != nil {
			return err
		}
	}
	mean, _ := loss(pulled.Values["logistic"], samples)
	fmt.Printf("loss %.4f\n", mean)
	return nil
}

func main() {
	servers := flag.String("servers", "127.0.0.1:7070", "addresses of the servers, separated by commas")
	data := flag.String("data", "a9a.gz", "the data set, gzipped")
	steps := flag.Int("steps", 1000, "number of steps")
	batch := flag.Int("batch", 100, "samples per step")
	flag.Parse()
	if err := run(*servers, *data, *steps, *batch); err != nil {
		log.Fatal(err)
	}
}
