package lab

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// metricTimeout limits how long a read of metrics takes.
const metricTimeout = 20 * time.Second

// Metric returns the value of a metric without labels that a process serves at an address, host:port. ok is false if the
// process does not serve it.
func Metric(ctx context.Context, address, name string) (value float64, ok bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, metricTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/metrics", nil)
	if err != nil {
		return 0, false, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, false, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return 0, false, fmt.Errorf("read the metrics of %s: %s", address, response.Status)
	}
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		if text, found := strings.CutPrefix(lines.Text(), name+" "); found {
			value, err = strconv.ParseFloat(text, 64)
			return value, err == nil, err
		}
	}
	return 0, false, lines.Err()
}
