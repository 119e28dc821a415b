package network

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/session"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
)

func serviceIPs() *kind[*networkv1.ServiceIp] {
	return &kind[*networkv1.ServiceIp]{
		command: "service-ip", noun: "service IP", arg: "SERVICE-IP",
		header:    []string{"NAME", "VPC", "ADDRESS", "PORTS", "HEALTHY", "STATUS"},
		wide:      []string{"VPC"},
		wideInAll: []string{"PORTS"},
		max:       map[string]int{"PORTS": 20},
		row: func(x *networkv1.ServiceIp, l *labels) []string {
			all := make([]string, len(x.GetPorts()))
			for i, p := range x.GetPorts() {
				all[i] = servicePort(p)
			}
			return []string{
				nameOf(x), l.of(vpcs(), x.GetVpcId()), x.GetAddress(), strings.Join(all, ", "), healthy(x), status(x),
			}
		},
		fields: func(x *networkv1.ServiceIp, l *labels) [][2]string {
			affinity := "none"
			if x.GetAffinity() == networkv1.Affinity_AFFINITY_CLIENT_IP {
				affinity = "client-ip"
			}
			return [][2]string{
				{"VPC", l.of(vpcs(), x.GetVpcId())}, {"Subnet", l.of(subnets(), x.GetSubnetId())},
				{"Address", x.GetAddress()},
				{"Affinity", affinity},
				{"Selector", pairsText(x.GetSelector())},
				{"Health check", healthCheck(x.GetHealthCheck())}, {"Healthy", healthy(x)},
			}
		},
		more:  serviceTables,
		about: func(x *networkv1.ServiceIp) string { return x.GetAddress() + " in VPC " + x.GetVpcId() },
		page: func(ctx context.Context, c networkv1.NetworkServiceClient, q query) ([]*networkv1.ServiceIp, string, error) {
			page, err := c.ListServiceIps(ctx, &networkv1.ListServiceIpsRequest{
				OrgId: q.org, ProjectId: q.project, PageSize: q.size, PageToken: q.token, Name: q.name,
				VpcId: q.vpc,
			})
			return page.GetServiceIps(), page.GetNextPageToken(), err
		},
		everywhere: func(ctx context.Context, c networkv1.NetworkServiceClient, q query) ([]*networkv1.ServiceIp, string, error) {
			page, err := c.ListAllServiceIps(ctx, &networkv1.ListAllServiceIpsRequest{
				OrgId: q.org, ProjectId: q.project, PageSize: q.size, PageToken: q.token,
			})
			return page.GetServiceIps(), page.GetNextPageToken(), err
		},
		get: func(ctx context.Context, t *target, id string) (*networkv1.ServiceIp, error) {
			return t.client.GetServiceIp(ctx, &networkv1.GetServiceIpRequest{OrgId: t.org, ProjectId: t.project, Id: id})
		},
		remove: func(ctx context.Context, t *target, id string) error {
			_, err := t.client.DeleteServiceIp(
				ctx, &networkv1.DeleteServiceIpRequest{OrgId: t.org, ProjectId: t.project, Id: id},
			)
			return err
		},
	}
}

// servicePort formats a port in the form that parseServicePort reads.
func servicePort(p *networkv1.ServicePort) string {
	if p.GetTargetPort() == 0 || p.GetTargetPort() == p.GetPort() {
		return fmt.Sprintf("%d/%s", p.GetPort(), p.GetProtocol())
	}
	return fmt.Sprintf("%d:%d/%s", p.GetPort(), p.GetTargetPort(), p.GetProtocol())
}

// healthy returns the number of healthy backends and of all backends, such as "2 of 3".
func healthy(x *networkv1.ServiceIp) string {
	n := 0
	for _, b := range x.GetBackends() {
		if b.GetHealthy() {
			n++
		}
	}
	return fmt.Sprintf("%d of %d", n, len(x.GetBackends()))
}

// healthCheck formats a health check, with the defaults of the API for fields that are 0.
func healthCheck(h *networkv1.HealthCheck) string {
	if h == nil {
		return "none"
	}
	text := h.GetProtocol()
	if h.GetPath() != "" {
		text += ":" + h.GetPath()
	}
	if h.GetPort() != 0 {
		text += " on port " + number(h.GetPort())
	}
	return text + fmt.Sprintf(" every %d s, unhealthy after %d failures, healthy after %d successes",
		cmp.Or(h.GetIntervalSeconds(), 10), cmp.Or(h.GetUnhealthyThreshold(), 3), cmp.Or(h.GetHealthyThreshold(), 2))
}

// serviceTables prints the ports and the backends of a service IP.
func serviceTables(w io.Writer, x *networkv1.ServiceIp, l *labels) error {
	var open, backends [][]string
	for _, p := range x.GetPorts() {
		open = append(
			open,
			[]string{p.GetName(), number(p.GetPort()), number(cmp.Or(p.GetTargetPort(), p.GetPort())), p.GetProtocol()},
		)
	}
	for _, b := range x.GetBackends() {
		to := b.GetAddress()
		if b.GetPortId() != "" {
			to = portPrefix + l.of(ports(), b.GetPortId())
		}
		health := yes(b.GetHealthy())
		if !b.GetHealthy() && !b.GetChecked() {
			health = "not checked yet"
		}
		backends = append(backends, []string{to, number(max(b.GetWeight(), 1)), health})
	}
	if err := table(w, []string{"PORT NAME", "PORT", "TARGET PORT", "PROTOCOL"}, open); err != nil {
		return err
	}
	return table(w, []string{"BACKEND", "WEIGHT", "HEALTHY"}, backends)
}

// serviceIPCommand returns the command `trivet network service-ip`.
func serviceIPCommand(s *session.Session) *cobra.Command {
	c := group("service-ip", "Distribute connections over backends",
		`Create and list service IPs. A service IP is an address of a VPC that distributes connections over backends: ports or
addresses. With --selector, the backends are the ports of the VPC that have certain labels. With a health check,
backends that do not respond get no new connections.`,
		`  trivet network service-ip create shop --subnet front --port 443:8443/tcp --backend port:web-1 --backend port:web-2 --check tcp
  trivet network service-ip create web --subnet front --port 80 --selector app=web
  trivet network floating-ip create --service-ip shop
  trivet network service-ip show shop`)
	c.AddCommand(createServiceIPCommand(s), serviceIPs().listCommand(s, inVPC()),
		serviceIPs().showCommand(s, "Show a service IP and the health of its backends"),
		updateServiceIPCommand(s), serviceIPs().deleteCommand(s, "Delete a service IP without a floating IP"))
	return c
}

const (
	portPrefix      = "port:"
	servicePortForm = "[NAME=]PORT[:TARGET-PORT][/tcp|udp], such as 443:8443/tcp"
	backendForm     = "port:NAME or ADDRESS, and optionally =WEIGHT of 1 to 100, such as port:web-1=10"
	checkForm       = "tcp or http:/PATH"
)

// serviceFlags holds the flags that `service-ip create` and `service-ip update` share.
type serviceFlags struct {
	ports, backends     []string
	selector            []string
	check, affinity     string
	checkPort, interval uint32
	unhealthy, healthy  uint32
}

func (f *serviceFlags) add(c *cobra.Command, s *session.Session) {
	p := c.Flags()
	p.StringArrayVar(&f.ports, "port", nil, servicePortForm+"; repeatable, at most 32")
	p.StringArrayVar(&f.backends, "backend", nil, backendForm+"; repeatable, at most 250")
	p.StringArrayVar(&f.selector, "selector", nil, "KEY=VALUE: the backends are the ports of the VPC with this label; "+
		"repeatable, a port then needs all labels")
	session.Exclusive(c, "backend", "selector")
	p.StringVar(&f.check, "check", "", "health check of the backends: "+checkForm+", or none")
	p.Uint32Var(&f.checkPort, "check-port", 0, "port of the health check (default: the target port of the first --port)")
	p.Uint32Var(&f.interval, "check-interval", 0, "seconds between health checks, 1 to 300 (default 10)")
	p.Uint32Var(&f.unhealthy, "check-failures", 0, "failures after which a backend is unhealthy, 1 to 10 (default 3)")
	p.Uint32Var(&f.healthy, "check-successes", 0, "successes after which a backend is healthy again, 1 to 10 (default 2)")
	p.StringVar(&f.affinity, "affinity", "", "client-ip: a client's connections go to the same backend; none")
	completeFlag(c, "affinity", cobra.FixedCompletions([]string{"client-ip", "none"}, cobra.ShellCompDirectiveNoFileComp))
	completeFlag(c, "backend", prefixed(portPrefix, ports().complete(s)))
	completeFlag(c, "check", cobra.FixedCompletions([]string{"tcp", "http:/", "none"}, cobra.ShellCompDirectiveNoSpace))
}

// serviceParts holds the parsed values of serviceFlags.
type serviceParts struct {
	ports    []*networkv1.ServicePort
	backends []*networkv1.Backend
	selector map[string]string
	check    *networkv1.HealthCheck
	affinity networkv1.Affinity
}

// parse returns the values of the flags. A backend's port is a name or an ID; findBackends looks it up.
func (f *serviceFlags) parse() (x serviceParts, err error) {
	for _, text := range f.ports {
		p, err := parseServicePort(text, len(f.ports) > 1)
		if err != nil {
			return x, err
		}
		x.ports = append(x.ports, p)
	}
	for _, text := range f.backends {
		b, err := parseBackend(text)
		if err != nil {
			return x, err
		}
		x.backends = append(x.backends, b)
	}
	if x.selector, err = session.Pairs("selector", f.selector); err != nil {
		return x, err
	}
	switch f.affinity {
	case "", "none":
		x.affinity = networkv1.Affinity_AFFINITY_NONE
	case "client-ip":
		x.affinity = networkv1.Affinity_AFFINITY_CLIENT_IP
	default:
		return x, session.Usagef("--affinity %q: want client-ip or none", f.affinity)
	}
	x.check, err = f.parseCheck()
	return x, err
}

func (f *serviceFlags) parseCheck() (*networkv1.HealthCheck, error) {
	protocol, path, _ := strings.Cut(f.check, ":")
	switch {
	case f.check == "" || f.check == "none":
		if f.checkPort+f.interval+f.unhealthy+f.healthy > 0 {
			return nil, session.Usagef(
				"--check-port, --check-interval, --check-failures and --check-successes need --check %s", checkForm,
			)
		}
		return nil, nil
	case f.check == "tcp", f.check == "http", protocol == "http" && strings.HasPrefix(path, "/"):
		return &networkv1.HealthCheck{
			Protocol: protocol, Path: path, Port: f.checkPort, IntervalSeconds: f.interval,
			UnhealthyThreshold: f.unhealthy,
			HealthyThreshold:   f.healthy,
		}, nil
	}
	return nil, session.Usagef("--check %q: want %s", f.check, checkForm)
}

// parseServicePort parses a value of --port. If needsName is true, a port without a name gets one such as tcp-443.
func parseServicePort(text string, needsName bool) (*networkv1.ServicePort, error) {
	bad := session.Usagef("--port %q: want %s", text, servicePortForm)
	name, rest, named := strings.Cut(text, "=")
	if !named {
		name, rest = "", text
	}
	numbers, protocol, given := strings.Cut(rest, "/")
	if !given {
		protocol = "tcp"
	}
	port, target, ok := numberRange(numbers, ":", 1, 65535)
	if !ok || named && name == "" || protocol != "tcp" && protocol != "udp" {
		return nil, bad
	}
	if name == "" && needsName {
		name = fmt.Sprintf("%s-%d", protocol, port)
	}
	return &networkv1.ServicePort{Name: name, Protocol: protocol, Port: port, TargetPort: target}, nil
}

func parseBackend(text string) (*networkv1.Backend, error) {
	to, weightText, weighted := strings.Cut(text, "=")
	weight, err := strconv.ParseUint(weightText, 10, 32)
	port, isPort := strings.CutPrefix(to, portPrefix)
	switch {
	case weighted && (err != nil || weight < 1 || weight > 100), isPort && port == "", !isPort && !isAddress(to):
		return nil, session.Usagef("--backend %q: want %s", text, backendForm)
	case isPort:
		return &networkv1.Backend{PortId: port, Weight: uint32(weight)}, nil
	}
	return &networkv1.Backend{Address: to, Weight: uint32(weight)}, nil
}

// findBackends replaces the names of the backends' ports by their IDs.
func findBackends(ctx context.Context, t *target, backends []*networkv1.Backend) (err error) {
	for _, b := range backends {
		if b.GetPortId() == "" {
			continue
		}
		if b.PortId, err = ports().find(ctx, t, b.GetPortId()); err != nil {
			return err
		}
	}
	return nil
}

func createServiceIPCommand(s *session.Session) *cobra.Command {
	req := &networkv1.CreateServiceIpRequest{}
	var f serviceFlags
	var subnet, vpc string
	c := &cobra.Command{
		Use: "create NAME", Short: "Create a service IP in a subnet or VPC", Args: session.Exactly("NAME"),
		Long: `Create a service IP with an address of a subnet, or with --vpc one of the VPC's service CIDR. A --port is
` + servicePortForm + `,
and a --backend is ` + backendForm + `.
If there are several ports, those without a name get one, such as tcp-443.`,
		Example: `  trivet network service-ip create shop --subnet front --port 443:8443/tcp --backend port:web-1 --backend port:web-2 --check http:/health
  trivet network service-ip create dns --subnet front --port 53/udp --port 53/tcp --backend 10.0.1.10 --backend 10.0.1.11=2`,
	}
	refFlag(c, s, &subnet, "subnet", "subnet of the address, by name or ID", subnets())
	refFlag(c, s, &vpc, "vpc", "VPC with a service CIDR that has the address, by name or ID", vpcs())
	c.Flags().StringVar(&req.Address, "address", "", "address (default: the lowest free one)")
	f.add(c, s)
	c.Flags().StringVar(&req.Description, "description", "", "description")
	session.Require(c, "port")
	session.RequireOne(c, "subnet", "vpc")
	session.Exclusive(c, "subnet", "vpc")
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) (err error) {
		parts, err := f.parse()
		if err != nil {
			return err
		}
		if err := checkAddresses("address", req.Address); err != nil {
			return err
		}
		if req.Name, err = nameArg(args); err != nil {
			return err
		}
		if vpc != "" {
			req.VpcId, err = vpcs().find(ctx, t, vpc)
		} else {
			req.SubnetId, err = subnets().find(ctx, t, subnet)
		}
		if err != nil {
			return err
		}
		if err := findBackends(ctx, t, parts.backends); err != nil {
			return err
		}
		req.OrgId, req.ProjectId = t.org, t.project
		req.Ports, req.Backends, req.HealthCheck, req.Affinity = parts.ports, parts.backends, parts.check, parts.affinity
		req.Selector = parts.selector
		x, err := t.client.CreateServiceIp(ctx, req)
		return serviceIPs().printMade(ctx, t, x, err)
	})
	return c
}

func updateServiceIPCommand(s *session.Session) *cobra.Command {
	var change changes
	var f serviceFlags
	var noBackends bool
	c := serviceIPs().argCommand(s, "update", "Change the ports, backends and health check of a service IP")
	c.Long = `Change a service IP. --port and --backend replace all former ports and backends, and --check replaces the health check.
--selector replaces the former selector or all backends, and --backend and --no-backends replace a selector.
Connections to backends that are removed end within a second; others continue.`
	c.Example = `  trivet network service-ip update shop --backend port:web-1 --backend port:web-3
  trivet network service-ip update shop --check none --affinity client-ip`
	change.add(c)
	f.add(c, s)
	c.Flags().BoolVar(&noBackends, "no-backends", false, "remove all backends")
	session.Exclusive(c, "backend", "no-backends")
	session.Exclusive(c, "selector", "no-backends")
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) error {
		if err := change.check(); err != nil {
			return err
		}
		parts, err := f.parse()
		if err != nil {
			return err
		}
		was, err := serviceIPs().read(ctx, t, args[0])
		if err != nil {
			return err
		}
		if err := findBackends(ctx, t, parts.backends); err != nil {
			return err
		}
		req := &networkv1.UpdateServiceIpRequest{
			OrgId: t.org, ProjectId: t.project, Id: was.GetId(), Name: change.newName(),
			Description: change.newDescription(),
			Ports:       was.GetPorts(), Backends: was.GetBackends(), HealthCheck: was.GetHealthCheck(),
			Affinity: was.GetAffinity(),
			Selector: was.GetSelector(),
		}
		if len(req.Selector) > 0 {
			req.Backends = nil // those that the selector selects at present
		}
		if len(parts.ports) > 0 {
			req.Ports = parts.ports
		}
		if len(parts.backends) > 0 || noBackends {
			req.Backends, req.Selector = parts.backends, nil
		}
		if len(parts.selector) > 0 {
			req.Backends, req.Selector = nil, parts.selector
		}
		if f.check != "" {
			req.HealthCheck = parts.check
		}
		if f.affinity != "" {
			req.Affinity = parts.affinity
		}
		x, err := t.client.UpdateServiceIp(ctx, req)
		return serviceIPs().printMade(ctx, t, x, err)
	})
	return c
}
