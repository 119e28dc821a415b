package network

import "github.com/prometheus/client_golang/prometheus"

// feedMetrics are the metrics of a Feed.
type feedMetrics struct {
	sessions prometheus.Gauge
	messages prometheus.Counter
	lag      prometheus.Histogram
}

func newFeedMetrics(r prometheus.Registerer) feedMetrics {
	m := feedMetrics{
		sessions: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "trivet_network_feed_sessions", Help: "Hosts that receive the state of VPCs from this member.",
		}),
		messages: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "trivet_network_feed_messages_total", Help: "Messages with the state of VPCs that this member has sent to hosts.",
		}),
		lag: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "trivet_network_feed_ack_duration_seconds",
			Help:    "Time between sending a revision of the state of VPCs and its acknowledgment.",
			Buckets: prometheus.ExponentialBuckets(0.005, 4, 8),
		}),
	}
	if r != nil {
		r.MustRegister(m.sessions, m.messages, m.lag)
	}
	return m
}
