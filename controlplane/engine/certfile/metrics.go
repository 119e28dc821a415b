package certfile

import "github.com/prometheus/client_golang/prometheus"

var expiry = prometheus.NewDesc("trivet_tls_certificate_expiry_timestamp_seconds",
	"Time at which the certificate of the ports for tenants expires, in Unix time.", nil, nil)

var _ prometheus.Collector = (*Pair)(nil)

// Describe implements prometheus.Collector with the gauge trivet_tls_certificate_expiry_timestamp_seconds.
func (p *Pair) Describe(out chan<- *prometheus.Desc) { out <- expiry }

// Collect implements prometheus.Collector: it sends the expiry of the certificate in use, in Unix seconds. It sends
// nothing if p is nil, so that a program without a certificate describes the same metrics.
func (p *Pair) Collect(out chan<- prometheus.Metric) {
	if p == nil {
		return
	}
	out <- prometheus.MustNewConstMetric(expiry, prometheus.GaugeValue, float64(p.Leaf().NotAfter.Unix()))
}
