package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"time"

	"github.com/trivet-cloud/trivet/e2e/bench/figure"
	"github.com/trivet-cloud/trivet/e2e/bench/report"
	"github.com/trivet-cloud/trivet/e2e/lab"
)

// measureStreams measures throughput and CPU time of TCP between namespaces with iperf3.
func measureStreams(ctx context.Context, b *bench) (err error) {
	if _, err := exec.LookPath("iperf3"); err != nil {
		report.Say("iperf3 is not installed: no streams")
		b.results.Note("tcp cpu", "iperf3 is not installed")
		return nil
	}
	t, err := newTestbed(ctx, b)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.site.close()) }()
	for _, c := range []struct {
		id         string
		ours, peer [2]string // the namespaces of sender and receiver
		to         netip.Addr
	}{
		{"tcp", [2]string{t.many.near, t.many.local}, [2]string{t.bridge.near, t.bridge.local}, addressOf(local)},
		{"tcp vxlan", [2]string{t.many.near, t.many.far}, [2]string{t.vxlan.near, t.vxlan.far}, addressOf(far)},
	} {
		turn := func(between [2]string, isPeer bool) error {
			cpu, rate, err := stream(ctx, between[0], between[1], c.to, b.size.stream)
			if err != nil {
				return err
			}
			b.results.Add(c.id+" cpu", isPeer, cpu)
			b.results.Add(c.id+" rate", isPeer, rate)
			return nil
		}
		if err := b.InTurn(ctx, b.rounds,
			func(int) error { return turn(c.ours, false) },
			func(int) error { return turn(c.peer, true) },
		); err != nil {
			return fmt.Errorf("%s: %w", c.id, err)
		}
		f := b.results.Of(c.id + " cpu")
		report.Say("%s: %.3f s of CPU per GB, peer %.3f", c.id, figure.Median(f.Ours), figure.Median(f.Peer))
	}
	return nil
}

// iperfReport is the part of the output of `iperf3 --json` that is used.
type iperfReport struct {
	Error string `json:"error"`
	End   struct {
		Received struct {
			Bytes         float64 `json:"bytes"`
			BitsPerSecond float64 `json:"bits_per_second"`
		} `json:"sum_received"`
	} `json:"end"`
}

// stream sends one TCP stream from a namespace to another. It returns the CPU time of both programs in seconds per GB
// (10^9 bytes) that arrived, and the throughput in Gbit/s.
func stream(
	ctx context.Context, from, to string, address netip.Addr, length time.Duration,
) (cpu, rate float64, err error) {
	ctx, cancel := context.WithTimeout(ctx, length+30*time.Second)
	defer cancel()
	server := exec.CommandContext(ctx, "ip", "netns", "exec", to, "iperf3", "--server", "--one-off")
	if err := server.Start(); err != nil {
		return 0, 0, err
	}
	ended := false
	defer func() {
		if !ended {
			_ = server.Process.Kill() // it may have ended by itself
			_ = server.Wait()
		}
	}()
	var output bytes.Buffer
	var client *exec.Cmd
	var report iperfReport
	// The server listens some time after its start.
	err = lab.Until(ctx, "iperf3 has measured", func(ctx context.Context) error {
		output.Reset()
		client = exec.CommandContext(ctx, "ip", "netns", "exec", from, "iperf3", "--json", "--client", address.String(),
			"--time", strconv.FormatFloat(length.Seconds(), 'f', 0, 64))
		client.Stdout = &output
		runErr := client.Run()
		report = iperfReport{}
		return errors.Join(json.Unmarshal(output.Bytes(), &report), reportError(report.Error), runErr)
	})
	if err != nil {
		return 0, 0, err
	}
	ended = true
	if err := server.Wait(); err != nil {
		return 0, 0, fmt.Errorf("iperf3 as server: %w", err)
	}
	if report.End.Received.Bytes == 0 {
		return 0, 0, errors.New("iperf3 received nothing")
	}
	used := time.Duration(0)
	for _, s := range []*os.ProcessState{server.ProcessState, client.ProcessState} {
		used += s.UserTime() + s.SystemTime()
	}
	return used.Seconds() / (report.End.Received.Bytes / 1e9), report.End.Received.BitsPerSecond / 1e9, nil
}

func reportError(text string) error {
	if text == "" {
		return nil
	}
	return errors.New("iperf3: " + text)
}
