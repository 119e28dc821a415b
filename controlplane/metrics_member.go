package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity"
	"github.com/trivet-cloud/trivet/controlplane/engine/layout"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

var (
	loginsDesc = prometheus.NewDesc("trivet_logins_total",
		"Attempts to authenticate on this member with a password, a client secret or an ID token of an OIDC provider, by "+
			"result.", []string{"result"}, nil)
	revokedDesc = prometheus.NewDesc("trivet_tokens_revoked_total",
		"Calls on this member that revoked one token, or all tokens of a user or service account.", nil, nil)
	adminTokenDesc = prometheus.NewDesc("trivet_admin_token_expiry_timestamp_seconds",
		"Time at which the administrator's token in the data directory (admin.token) expires, in Unix time; absent if there "+
			"is none.", nil, nil)
	memberCertificateDesc = prometheus.NewDesc("trivet_member_certificate_expiry_timestamp_seconds",
		"Time at which the certificate that this member presents to other members and to agents expires, in Unix time.",
		nil, nil)
	backupDesc = prometheus.NewDesc("trivet_backup_last_success_timestamp_seconds",
		"Time of the last backup that this member has completed, in Unix time; absent if it has completed none.", nil, nil)
)

// loginCollector exports how many attempts to authenticate have succeeded and failed on this member, and how often tokens
// were revoked.
type loginCollector struct{ identities *identity.Service }

// Describe implements prometheus.Collector.
func (c *loginCollector) Describe(out chan<- *prometheus.Desc) {
	out <- loginsDesc
	out <- revokedDesc
}

// Collect implements prometheus.Collector.
func (c *loginCollector) Collect(out chan<- prometheus.Metric) {
	succeeded, failed := c.identities.Logins()
	out <- prometheus.MustNewConstMetric(loginsDesc, prometheus.CounterValue, float64(succeeded), "ok")
	out <- prometheus.MustNewConstMetric(loginsDesc, prometheus.CounterValue, float64(failed), "failed")
	out <- prometheus.MustNewConstMetric(revokedDesc, prometheus.CounterValue, float64(c.identities.Revocations()))
}

// certificateCollector exports when the certificate of this member expires.
type certificateCollector struct{ certificate mtls.Source }

// Describe implements prometheus.Collector.
func (c *certificateCollector) Describe(out chan<- *prometheus.Desc) { out <- memberCertificateDesc }

// Collect implements prometheus.Collector. It exports nothing while the member has no certificate.
func (c *certificateCollector) Collect(out chan<- prometheus.Metric) {
	if own, err := c.certificate(); err == nil && own.Leaf != nil {
		out <- prometheus.MustNewConstMetric(memberCertificateDesc, prometheus.GaugeValue, float64(own.Leaf.NotAfter.Unix()))
	}
}

// adminTokenCollector exports when the administrator's token in the data directory dir expires.
type adminTokenCollector struct{ dir string }

// Describe implements prometheus.Collector.
func (c *adminTokenCollector) Describe(out chan<- *prometheus.Desc) { out <- adminTokenDesc }

// Collect implements prometheus.Collector. It computes the expiry from the time at which the file was written, as
// renewAdminToken does. An empty file contains no token.
func (c *adminTokenCollector) Collect(out chan<- prometheus.Metric) {
	if info, err := os.Stat(filepath.Join(c.dir, layout.AdminTokenFile)); err == nil && info.Size() > 0 {
		expiry := info.ModTime().Add(adminTokenLife)
		out <- prometheus.MustNewConstMetric(adminTokenDesc, prometheus.GaugeValue, float64(expiry.Unix()))
	}
}

// Describe implements prometheus.Collector.
func (a *backupWriter) Describe(out chan<- *prometheus.Desc) { out <- backupDesc }

// Collect implements prometheus.Collector. The time of the last backup is in a file, so that it survives a restart.
func (a *backupWriter) Collect(out chan<- prometheus.Metric) {
	text, err := os.ReadFile(filepath.Join(a.c.DataDir, layout.BackupTimeFile))
	if err != nil {
		return
	}
	if at, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil {
		out <- prometheus.MustNewConstMetric(backupDesc, prometheus.GaugeValue, float64(at))
	}
}
