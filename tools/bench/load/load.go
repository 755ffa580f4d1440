// NATS' Go client as a load. Arguments and output: tools/bench/loads.py.
//
// One outstanding send is synchronous; more are asynchronous, which costs this client half as much as
// a goroutine for each.
package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	maxSync       = 1
	fetchMessages = 1000
	attempts      = 100
	probeEvery    = 10 * time.Millisecond
	maxProbes     = 1000
	maxFill       = 512
)

var (
	measuring, stopping atomic.Bool
	messages, failed    atomic.Int64
	lock                sync.Mutex
	samples             []int64
)

func main() {
	mode, address, topic := os.Args[1], os.Args[2], os.Args[3]
	number := func(place int) int { value, err := strconv.Atoi(os.Args[place]); fatal(err); return value }
	seconds := func(place int) time.Duration {
		value, err := strconv.ParseFloat(os.Args[place], 64)
		fatal(err)
		return time.Duration(value * float64(time.Second))
	}
	outstanding, body := number(4), make([]byte, number(6))
	warm, measured, backlog := seconds(7), seconds(8), number(9)

	js, stream := open(address, topic, outstanding)
	switch {
	case mode == "leader":
		fmt.Println("leader", leader(stream))
		return
	case mode == "drain":
		fill(js, stream, topic, body, backlog)
		go drain(stream, outstanding, backlog)
	case mode == "kill":
		for range outstanding {
			go sendAndReport(js, topic, body)
		}
		go probe(js, topic, body)
	case outstanding <= maxSync:
		for range outstanding {
			go sendSync(js, topic, body)
		}
	default:
		go sendAsync(js, topic, body, outstanding)
	}
	window(warm, measured)
}

func fatal(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// open connects and makes the stream of three replicas, which a new cluster refuses for a while.
func open(address, topic string, outstanding int) (jetstream.JetStream, jetstream.Stream) {
	var err error
	for range attempts {
		var nc *nats.Conn
		var stream jetstream.Stream
		nc, err = nats.Connect(address, nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond))
		if err == nil {
			js, made := jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(2*max(outstanding, maxFill)))
			fatal(made)
			within, cancel := context.WithTimeout(context.Background(), 3*time.Second)
			stream, err = js.CreateOrUpdateStream(within, jetstream.StreamConfig{
				Name: topic, Subjects: []string{topic}, Replicas: 3, Storage: jetstream.FileStorage,
			})
			cancel()
			if err == nil {
				return js, stream
			}
			nc.Close()
		}
		time.Sleep(300 * time.Millisecond)
	}
	fatal(err)
	return nil, nil
}

// leader returns the name of the stream's leader when both other replicas are current.
func leader(stream jetstream.Stream) string {
	for range attempts {
		within, cancel := context.WithTimeout(context.Background(), 3*time.Second)
		info, err := stream.Info(within)
		cancel()
		if err == nil && info.Cluster != nil && info.Cluster.Leader != "" {
			current := 0
			for _, replica := range info.Cluster.Replicas {
				if replica.Current && !replica.Offline {
					current++
				}
			}
			if current == 2 {
				return info.Cluster.Leader
			}
		}
		time.Sleep(200 * time.Millisecond)
	}
	fatal(fmt.Errorf("the stream has no leader with two current replicas"))
	return ""
}

func window(warm, measured time.Duration) {
	time.Sleep(warm)
	began := time.Now()
	measuring.Store(true)
	fmt.Println("begin")
	time.Sleep(measured)
	measuring.Store(false)
	took := time.Since(began).Seconds()
	fmt.Println("end")
	stopping.Store(true)
	lock.Lock()
	defer lock.Unlock()
	slices.Sort(samples)
	rank := func(part float64) float64 {
		if len(samples) == 0 {
			return 0
		}
		return float64(samples[int(float64(len(samples))*part)]) / 1e6
	}
	fmt.Printf("result {\"messages\": %d, \"failed\": %d, \"seconds\": %.6f, \"p50_ms\": %.4f, \"p99_ms\": %.4f, \"p999_ms\": %.4f}\n",
		messages.Load(), failed.Load(), took, rank(0.5), rank(0.99), rank(0.999))
}

func stored(began time.Time, count int) {
	if !measuring.Load() {
		return
	}
	messages.Add(int64(count))
	took := int64(time.Since(began))
	lock.Lock()
	samples = append(samples, took)
	lock.Unlock()
}

func notStored() {
	if measuring.Load() {
		failed.Add(1)
	}
}

func sendSync(js jetstream.JetStream, topic string, body []byte) {
	for !stopping.Load() {
		began := time.Now()
		if _, err := js.Publish(context.Background(), topic, body); err != nil {
			notStored()
			time.Sleep(2 * time.Millisecond)
		} else {
			stored(began, 1)
		}
	}
}

type sent struct {
	future jetstream.PubAckFuture
	began  time.Time
}

// sendAsync keeps that many sends outstanding; acknowledgements of one stream come in order.
func sendAsync(js jetstream.JetStream, topic string, body []byte, outstanding int) {
	free := make(chan struct{}, outstanding)
	waiting := make(chan sent, outstanding)
	go func() {
		for one := range waiting {
			select {
			case <-one.future.Ok():
				stored(one.began, 1)
			case <-one.future.Err():
				notStored()
			}
			<-free
		}
	}()
	for !stopping.Load() {
		free <- struct{}{}
		began := time.Now()
		future, err := js.PublishAsync(topic, body)
		if err != nil {
			notStored()
			<-free
			time.Sleep(2 * time.Millisecond)
			continue
		}
		waiting <- sent{future, began}
	}
}

var reported atomic.Int64

func report(began, ended int64) {
	if last := reported.Load(); ended > last && reported.CompareAndSwap(last, ended) {
		fmt.Println("ack", began, ended)
	}
}

func sendAndReport(js jetstream.JetStream, topic string, body []byte) {
	for {
		began := time.Now().UnixMilli()
		if _, err := js.Publish(context.Background(), topic, body); err == nil {
			report(began, time.Now().UnixMilli())
		} else {
			time.Sleep(2 * time.Millisecond)
		}
	}
}

// probe begins a new send every 10 ms: one that was out to the killed leader waits 5 s for nothing.
func probe(js jetstream.JetStream, topic string, body []byte) {
	var out atomic.Int64
	for range time.Tick(probeEvery) {
		if out.Add(1) > maxProbes {
			out.Add(-1)
			continue
		}
		go func() {
			defer out.Add(-1)
			began := time.Now().UnixMilli()
			if _, err := js.Publish(context.Background(), topic, body); err == nil {
				report(began, time.Now().UnixMilli())
			}
		}()
	}
}

// fill writes the backlog; what failed is written again.
func fill(js jetstream.JetStream, stream jetstream.Stream, topic string, body []byte, backlog int) {
	for range attempts {
		info, err := stream.Info(context.Background())
		fatal(err)
		missing := backlog - int(info.State.Msgs)
		if missing <= 0 {
			return
		}
		for place := range missing {
			if _, err := js.PublishAsync(topic, body); err != nil {
				break
			}
			if place%maxFill == maxFill-1 {
				<-js.PublishAsyncComplete()
			}
		}
		<-js.PublishAsyncComplete()
	}
	fatal(fmt.Errorf("the backlog could not be written"))
}

// drain reads the backlog again and again, each time as a new consumer without acknowledgements.
func drain(stream jetstream.Stream, readers, backlog int) {
	for !stopping.Load() {
		consumer, err := stream.CreateConsumer(context.Background(), jetstream.ConsumerConfig{
			AckPolicy: jetstream.AckNonePolicy, DeliverPolicy: jetstream.DeliverAllPolicy,
			Replicas: 1, MemoryStorage: true,
		})
		fatal(err)
		var fetches atomic.Int64
		var group sync.WaitGroup
		for range readers {
			group.Add(1)
			go func() {
				defer group.Done()
				for !stopping.Load() && fetches.Add(1) <= int64(backlog/fetchMessages) {
					fetch(consumer)
				}
			}()
		}
		group.Wait()
	}
}

func fetch(consumer jetstream.Consumer) {
	began := time.Now()
	batch, err := consumer.Fetch(fetchMessages, jetstream.FetchMaxWait(5*time.Second))
	if err != nil {
		notStored()
		return
	}
	read := 0
	for message := range batch.Messages() {
		if len(message.Data()) > 0 {
			read++
		}
	}
	if batch.Error() != nil {
		notStored()
	}
	stored(began, read)
}
