package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"
)

const (
	dhcpScript = "/etc/udhcpc.script" // executed by udhcpc; prints the line NIC
	webRoot    = "/www"               // content of the HTTP server
	restart    = time.Second          // pause before a program that has ended is started again
)

// network runs DHCP clients for each network interface, and an HTTP server once there is an interface. The server and
// the client for IPv4 are applets of busybox.
type network struct {
	mu      sync.Mutex
	clients map[string]*client // by interface
	serving bool
}

// client configures an interface. An interface that was removed and added again has a new client.
type client struct {
	process *os.Process        // the DHCPv4 client; nil while it is being started again
	cancel  context.CancelFunc // ends the configuration of IPv6
}

// configureNICs configures every interface.
func (m *machine) configureNICs() {
	entries, err := os.ReadDir("/sys/class/net")
	if err != nil {
		m.say("ERROR start: list network interfaces: %v", err)
		return
	}
	for _, e := range entries {
		m.addNIC(e.Name())
	}
}

// addNIC starts the configuration of an interface, unless it has started already or the interface is no Ethernet card.
func (m *machine) addNIC(name string) {
	if !strings.HasPrefix(name, "eth") {
		return
	}
	m.net.mu.Lock()
	defer m.net.mu.Unlock()
	if _, ok := m.net.clients[name]; ok {
		return
	}
	if m.net.clients == nil {
		m.net.clients = map[string]*client{}
	}
	ctx, cancel := context.WithCancel(context.Background())
	c := &client{cancel: cancel}
	m.net.clients[name] = c
	go m.runClient(name, c)
	go m.runIPv6(ctx, name)
	if !m.net.serving {
		m.net.serving = true
		go m.serveHTTP()
	}
}

// removeNIC ends the configuration of an interface that was removed.
func (m *machine) removeNIC(name string) {
	m.net.mu.Lock()
	defer m.net.mu.Unlock()
	c, ok := m.net.clients[name]
	if !ok {
		return
	}
	delete(m.net.clients, name)
	c.cancel()
	if c.process != nil {
		_ = c.process.Kill() // it may have ended already
	}
	m.say("NIC name=%s removed", name)
}

// runClient runs the DHCPv4 client of an interface until the interface is removed, and prints the client's lines.
func (m *machine) runClient(name string, c *client) {
	for {
		// udhcpc sends three discovers at intervals of a second, then pauses for three seconds, without end.
		cmd := exec.Command("/bin/busybox", "udhcpc", "-f", "-i", name, "-s", dhcpScript, "-t", "3", "-T", "1", "-A", "3",
			"-O", "mtu", "-O", "staticroutes")
		cmd.Env = []string{"PATH=/bin:/sbin"}
		out, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			m.say("ERROR network: start DHCP client of %s: %v", name, err)
			return
		}
		if !m.setProcess(name, c, cmd.Process) {
			_ = cmd.Process.Kill()
		}
		for lines := bufio.NewScanner(out); lines.Scan(); {
			m.say("%s", lines.Text())
		}
		_ = cmd.Wait() // the client was killed, or "run" has collected its exit status
		time.Sleep(restart)
		if !m.setProcess(name, c, nil) {
			return
		}
	}
}

// setProcess records the process of the client c. It returns false if c is not the client of the interface any more.
func (m *machine) setProcess(name string, c *client, process *os.Process) bool {
	m.net.mu.Lock()
	defer m.net.mu.Unlock()
	if m.net.clients[name] != c {
		return false
	}
	c.process = process
	return true
}

// cgiRun is the program of /cgi-bin/run: it runs the shell script in the request's body and answers with the output and
// the exit status. Like the command "run", it creates the applets' links when they are needed first.
const cgiRun = `#!/bin/sh
printf 'Content-Type: text/plain\r\n\r\n'
[ -L /bin/ls ] || /bin/busybox --install -s /bin 2>/dev/null
PATH=/bin:/sbin /bin/sh 2>&1
echo "rc=$?"
`

// serveHTTP runs the HTTP server on port 80. Its page is the host name.
func (m *machine) serveHTTP() {
	if err := writeHostName(); err != nil {
		m.say("ERROR network: %v", err)
	}
	err := os.MkdirAll(webRoot+"/cgi-bin", 0o755)
	if err == nil {
		err = os.WriteFile(webRoot+"/cgi-bin/run", []byte(cgiRun), 0o755)
	}
	if err != nil {
		m.say("ERROR network: write /cgi-bin/run: %v", err)
	}
	for {
		cmd := exec.Command("/bin/busybox", "httpd", "-f", "-p", "80", "-h", webRoot)
		if err := cmd.Start(); err != nil {
			m.say("ERROR network: start HTTP server: %v", err)
			return
		}
		_ = cmd.Wait() // it runs until the machine stops
		time.Sleep(restart)
	}
}

// writeHostName writes the page of the HTTP server before a DHCP server has given a name. The DHCP script writes it
// again then.
func writeHostName() error {
	name, err := os.Hostname()
	if err != nil {
		return fmt.Errorf("read host name: %w", err)
	}
	f, err := os.OpenFile(webRoot+"/index.html", os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if errors.Is(err, os.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	_, err = f.WriteString(name + "\n")
	return errors.Join(err, f.Close())
}
