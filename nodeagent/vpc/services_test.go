package vpc

import (
	"cmp"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// parseService returns the service IP of a line as in TestHostVPC. Backends are ports or addresses, with *weight and a
// ! if they are unhealthy. The check is none, tcp or the path of a GET request, every second, and one result decides.
// With a selector, the backends are reports about the health of ports.
func parseService(t *testing.T, id string, args map[string]string) cloud.ServiceIP {
	s := cloud.ServiceIP{
		ID: cloud.ServiceIPID(id), Name: cmp.Or(args["name"], id), VPC: cloud.VPCID(args["vpc"]),
		Address: netip.MustParseAddr(args["at"]), Affinity: cloud.AffinityNone,
	}
	if args["affinity"] != "" {
		s.Affinity = cloud.AffinityClientIP
	}
	for _, text := range strings.FieldsFunc(args["ports"], comma) {
		numbers, protocol, _ := strings.Cut(text, "/")
		p := cloud.ServicePort{Name: text, Protocol: cloud.ProtocolTCP}
		if protocol == "udp" {
			p.Protocol = cloud.ProtocolUDP
		}
		port, target, ok := strings.Cut(numbers, ":")
		if !ok {
			target = port
		}
		_, err := fmt.Sscan(port+" "+target, &p.Port, &p.Target)
		require.NoError(t, err)
		s.Ports = append(s.Ports, p)
	}
	unchecked := args["check"] == "" || args["checked"] == "no"
	for _, text := range strings.FieldsFunc(args["to"], comma) {
		text, unhealthy := strings.CutSuffix(text, "!")
		target, weight, _ := strings.Cut(text, "*")
		b := cloud.Backend{Port: cloud.PortID(target), Weight: 1, Healthy: !unhealthy, Checked: !unchecked}
		if address, err := netip.ParseAddr(target); err == nil {
			b.Port, b.Address = "", address
		}
		fmt.Sscan(weight, &b.Weight)
		s.Backends = append(s.Backends, b)
	}
	if s.Selector = parseLabels(args["selector"]); s.Selector != nil {
		s.Reports, s.Backends = s.Backends, nil
	}
	if check := args["check"]; check != "" {
		s.Health = &cloud.HealthCheck{IntervalSeconds: 1, Unhealthy: 1, Healthy: 1}
		if check != "tcp" {
			s.Health.HTTPPath = check
		}
	}
	return s
}

// parseLabels parses labels such as app:web,tier:front. It returns nil for an empty text.
func parseLabels(text string) (out map[string]string) {
	for _, pair := range strings.FieldsFunc(text, comma) {
		if out == nil {
			out = map[string]string{}
		}
		key, value, _ := strings.Cut(pair, ":")
		out[key] = value
	}
	return out
}

func showServices(b *strings.Builder, services []cloud.HostService) {
	for _, s := range services {
		fmt.Fprintf(b, "service %s %s with %d ports", s.Name, s.Address, len(s.Ports))
		if s.Floating.IsValid() {
			fmt.Fprintf(b, " and the floating IP %s", s.Floating)
		}
		b.WriteByte('\n')
		for _, to := range s.Backends {
			health := "unhealthy"
			if to.Healthy {
				health = "healthy"
			}
			fmt.Fprintf(b, "  to %s weight %d %s", to.Address, to.Weight, health)
			switch {
			case to.Source.IsValid():
				fmt.Fprintf(b, ", checked from %s", to.Source)
			case to.Reported:
				b.WriteString(", reported unchecked")
			}
			b.WriteByte('\n')
		}
	}
}
