package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/metrics"
	"github.com/trivet-cloud/trivet/shared/scrape"
)

// scrapePort returns the settings of metrics_listen.
func (c *Config) scrapePort() scrape.Port {
	return scrape.Port{Listen: c.MetricsListen, Address: c.MetricsAddress, Cert: c.MetricsCert, Key: c.MetricsKey, Token: c.MetricsToken}
}

// validateMetrics checks the settings of /metrics.
func (c *Config) validateMetrics() error {
	for _, name := range c.MetricsHosts {
		if !validName.MatchString(strings.ToLower(name)) {
			return fmt.Errorf("metrics_hosts: %q is not a host name", name)
		}
	}
	for _, f := range []struct{ key, path string }{
		{"metrics_cert", c.MetricsCert}, {"metrics_key", c.MetricsKey}, {"metrics_token", c.MetricsToken},
	} {
		if f.path != "" && !filepath.IsAbs(f.path) {
			return fmt.Errorf("%s: %q is not an absolute path", f.key, f.path)
		}
	}
	return c.scrapePort().Validate()
}

// metricsURL returns the URL at which Prometheus reaches metrics_listen, or "" if there is none. If the address of this
// host cannot be found now, metricsURL logs the reason and returns "": the next session reports it.
func (a *agent) metricsURL() string {
	url, err := a.config.scrapePort().URL(func() (string, error) {
		ctx, cancel := context.WithTimeout(context.Background(), addressTimeout)
		defer cancel()
		u, err := findUnderlay(ctx, &a.config)
		return u.vtep.String(), err
	})
	if err != nil {
		a.log.Warn("the address of metrics_listen is not reported to the control plane", "err", err)
	}
	return url
}

// metricsRetry is the time after which the agent tries again to serve metrics.
const metricsRetry = 30 * time.Second

// serveMetrics serves /metrics and /health on metrics_listen until ctx ends. An agent that cannot serve them, for example
// because the certificate cannot be read, logs the reason and tries again: an agent that stops lets the host's lease
// end, and the VMs with it.
func (a *agent) serveMetrics(ctx context.Context) {
	for {
		err := a.tryMetrics(ctx)
		if ctx.Err() != nil {
			return
		}
		a.log.Error("metrics are not served; the agent tries again", "in", metricsRetry, "err", err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(metricsRetry):
		}
	}
}

// tryMetrics serves metrics until ctx ends. It returns an error if it cannot.
func (a *agent) tryMetrics(ctx context.Context) error {
	secure, err := a.config.scrapePort().TLS()
	if err != nil {
		return fmt.Errorf("serve metrics: %w", err)
	}
	token := a.config.scrapePort().ReadToken()
	if token != nil {
		if _, err := token(); err != nil {
			return fmt.Errorf("serve metrics: %w", err)
		}
	}
	listener, err := net.Listen("tcp", a.config.MetricsListen)
	if err != nil {
		return fmt.Errorf("serve metrics: %w", err)
	}
	handler := metrics.Handler(a.sources(), metrics.Access{Hosts: a.config.metricsHosts(), Token: token}, a.log)
	return serve(ctx, listener, secure, handler)
}

// serve serves HTTP on listener until ctx ends. It uses TLS unless secure is nil.
func serve(ctx context.Context, listener net.Listener, secure *tls.Config, h http.Handler) error {
	if secure != nil {
		listener = tls.NewListener(listener, secure)
	}
	server := &http.Server{
		Handler: h, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second,
		IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10,
	}
	stop := context.AfterFunc(ctx, func() { server.Close() })
	defer stop()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve metrics: %w", err)
	}
	return nil
}
