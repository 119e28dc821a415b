package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/cluster/membership"
	"github.com/trivet-cloud/trivet/controlplane/compute/schedule"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/shared/scrape"
	"github.com/trivet-cloud/trivet/shared/version"
)

// serveMetrics opens the listener metrics_listen, which serves /metrics and /targets.
func (m *member) serveMetrics() error {
	port := m.config.ScrapePort()
	secure, err := port.TLS()
	if err != nil {
		return fmt.Errorf("metrics_listen: %w", err)
	}
	token := port.ReadToken()
	if token != nil {
		if _, err := token(); err != nil {
			return fmt.Errorf("metrics_listen: %w", err)
		}
	}
	mux := http.NewServeMux()
	mux.Handle("/", m.metrics.handler)
	mux.HandleFunc("GET /targets", m.serveTargets)
	routes := slices.Concat(m.metrics.handler.routes, []rest.Route{{Method: http.MethodGet, Path: "/targets",
		Open: "service discovery of Prometheus, for callers that can reach the port and have its token, if there is one"}})
	handler := routedHandler{scrape.RequireToken(token, m.log, mux), routes, m.metrics.handler.registries}
	return m.listeners.serve("metrics", m.config.MetricsListen, nil, handler, secure)
}

// target is an element of the response of /targets, as Prometheus's HTTP service discovery defines it.
type target struct {
	Targets []string          `json:"targets"`
	Labels  map[string]string `json:"labels"`
}

// The values of the label __meta_trivet_role, and of the parameter role of /targets.
const (
	memberRole = "member"
	agentRole  = "agent"
)

// targetsTime is the maximum time of a request for /targets.
const targetsTime = 10 * time.Second

// serveTargets responds with the members and the hosts' agents from which Prometheus can read metrics. The parameter
// role selects the members or the agents. Prometheus keeps its present targets if the response is an error.
func (m *member) serveTargets(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), targetsTime)
	defer cancel()
	role := r.URL.Query().Get("role")
	if role != "" && role != memberRole && role != agentRole {
		http.Error(w, "role must be member or agent", http.StatusBadRequest)
		return
	}
	targets := []target{}
	if role != agentRole {
		members, err := m.memberships.List(ctx, true)
		if err != nil {
			http.Error(w, "the members cannot be read: "+err.Error(), http.StatusServiceUnavailable)
			return
		}
		targets = append(targets, memberTargets(members)...)
	}
	if role != memberRole {
		hosts, err := m.nodes.States(ctx)
		if err != nil {
			http.Error(w, "the states of the hosts cannot be read: "+err.Error(), http.StatusServiceUnavailable)
			return
		}
		targets = append(targets, agentTargets(hosts)...)
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(targets) // the client has closed the connection
}

func memberTargets(members []membership.Member) (out []target) {
	for _, one := range members {
		if one.MetricsURL != "" {
			out = append(out, newTarget(one.MetricsURL, memberRole, strconv.FormatUint(one.ID, 10), one.Name, one.Version, string(one.State)))
		}
	}
	return out
}

func agentTargets(hosts []schedule.Candidate) (out []target) {
	for _, h := range hosts {
		if h.Node.MetricsURL != "" {
			out = append(out, newTarget(h.Node.MetricsURL, agentRole, string(h.Node.ID), h.Node.Name, h.Node.AgentVersion, h.State.String()))
		}
	}
	return out
}

// newTarget returns a target with the URL of its metrics, which has no path. Prometheus uses the label __scheme__, and
// drops the labels beginning with __meta_ unless the operator's configuration copies them.
func newTarget(url, role, id, name, version, state string) target {
	scheme, address, _ := strings.Cut(url, "://")
	return target{Targets: []string{address}, Labels: map[string]string{
		"__scheme__": scheme, "__meta_trivet_role": role, "__meta_trivet_id": id, "__meta_trivet_host": name,
		"__meta_trivet_version": version, "__meta_trivet_state": state,
	}}
}

// reportEvery is the interval at which runReport compares the member's record.
const reportEvery = 15 * time.Second

// runReport keeps the version of this member and the URL of its metrics in the member's record, until ctx ends. It
// compares them again and again, because an older leader does not store them, and a restored backup may have old ones.
func (m *member) runReport(ctx context.Context) {
	for {
		limited, cancel := context.WithTimeout(ctx, targetsTime)
		if err := m.report(limited); err != nil && ctx.Err() == nil {
			m.log.Debug("report the version and the metrics of this member", "err", err)
		}
		cancel()
		select {
		case <-ctx.Done():
			return
		case <-time.After(reportEvery):
		}
	}
}

func (m *member) report(ctx context.Context) error {
	url, err := m.config.ScrapePort().URL(func() (string, error) { return m.config.Listen, nil })
	if err != nil {
		return err
	}
	members, err := m.memberships.List(ctx, true)
	if err != nil {
		return err
	}
	for _, one := range members {
		if one.ID == m.config.NodeID && (one.MetricsURL != url || one.Version != version.Version()) {
			_, err = m.memberships.Update(ctx, membership.UpdateRequest{ID: one.ID, Report: &membership.Report{MetricsURL: url, Version: version.Version()}})
		}
	}
	return err
}
