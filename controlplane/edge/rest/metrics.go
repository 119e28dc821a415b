package rest

import (
	"fmt"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics records the durations of the requests of all HTTP services.
type Metrics struct{ seconds *prometheus.HistogramVec }

// NewMetrics returns a Metrics and registers it with reg.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	m := &Metrics{seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "trivet_http_request_duration_seconds",
		Help:    "Duration of requests to the REST APIs, by API (label service), route, method and HTTP status code.",
		Buckets: []float64{.001, .0025, .005, .01, .02, .05, .1, .25, .5, 1, 5, 30},
	}, []string{"service", "route", "method", "code"})}
	reg.MustRegister(m.seconds)
	return m
}

func (m *Metrics) observe(service, route, method string, status int, d time.Duration) {
	switch method {
	case http.MethodGet, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete:
	default:
		method = "other" // clients choose the method, and could otherwise add any number of label values
	}
	m.seconds.WithLabelValues(service, route, method, fmt.Sprint(status)).Observe(d.Seconds())
}
