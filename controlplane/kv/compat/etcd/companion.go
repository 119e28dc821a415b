package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"time"
)

// companion is what stays beside a member.
type companion struct {
	Parent    int      // the member's process
	Ports     []string // where its clients come in
	Scheme    string   // http or https
	Cert, Key string   // files, for https
	Forwards  []forward
}

// look is how often the companion looks whether the member is ready, and whether it still is there.
const look = 20 * time.Millisecond

// run ends when the member ends, or, with nothing to hand over, when it is ready.
func (c companion) run() error {
	ctx, cancel := context.WithCancel(context.Background())
	var work sync.WaitGroup
	defer work.Wait()
	defer cancel()
	for _, f := range c.Forwards {
		if f.Network == "unix" {
			os.Remove(f.From) // of an earlier life
		}
		listener, err := net.Listen(f.Network, f.From)
		if err != nil {
			return fmt.Errorf("listen on %s: %w", f.From, err)
		}
		work.Go(func() { hand(ctx, listener, f.To) })
	}
	ready := false
	for os.Getppid() == c.Parent {
		if !ready && c.isReady(ctx) {
			ready = true
			c.say("ready to serve client requests")
			if len(c.Forwards) == 0 {
				return nil
			}
		}
		time.Sleep(look)
	}
	return nil
}

// isReady reports whether clients can come in and a read that asks the other members is answered. It asks by HTTP/1, so
// that what a suite reads of the traffic of HTTP/2 in the member's log is the suite's.
func (c companion) isReady(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	for _, address := range c.Ports {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, c.Scheme+"://"+address+"/health", nil)
		if err != nil {
			return false
		}
		answer, err := c.client().Do(request)
		if err != nil {
			return false
		}
		answer.Body.Close()
		if answer.StatusCode != http.StatusOK {
			return false
		}
	}
	return true
}

// client shows the member's own certificate where one is asked for, and does not mind whose it sees.
func (c companion) client() *http.Client {
	config := &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"http/1.1"}}
	if pair, err := tls.LoadX509KeyPair(c.Cert, c.Key); err == nil {
		config.Certificates = []tls.Certificate{pair}
	}
	return &http.Client{Transport: &http.Transport{TLSClientConfig: config, DisableKeepAlives: true}}
}

// say writes a line as etcd logs.
func (c companion) say(message string) {
	line, err := json.Marshal(map[string]string{
		"level": "info", "ts": time.Now().UTC().Format("2006-01-02T15:04:05.000000Z0700"), "caller": "etcd/companion.go", "msg": message,
	})
	if err == nil {
		os.Stderr.Write(append(line, '\n'))
	}
}

// hand hands connections over until ctx ends.
func hand(ctx context.Context, listener net.Listener, to string) {
	stop := context.AfterFunc(ctx, func() { listener.Close() })
	defer stop()
	var work sync.WaitGroup
	defer work.Wait()
	for {
		in, err := listener.Accept()
		if err != nil {
			return
		}
		work.Go(func() {
			out, err := net.DialTimeout("tcp", to, time.Second)
			if err != nil {
				in.Close()
				return
			}
			end := context.AfterFunc(ctx, func() { in.Close(); out.Close() })
			defer end()
			defer in.Close()
			defer out.Close()
			var back sync.WaitGroup
			back.Go(func() { io.Copy(in, out); in.Close() })
			io.Copy(out, in)
			out.Close()
			back.Wait()
		})
	}
}
