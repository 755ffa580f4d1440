// Apache's Go client of the gRPC protocol, as a producer or a simple consumer. A request a line
// comes in, lines of JSON go out. It always speaks TLS.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	rocketmq "github.com/apache/rocketmq-clients/golang/v5"
	"github.com/apache/rocketmq-clients/golang/v5/credentials"
)

const (
	senders   = 16
	invisible = 20 * time.Second
)

type line map[string]any

var writing sync.Mutex

func put(what line) {
	text, err := json.Marshal(what)
	if err != nil {
		panic(err)
	}
	writing.Lock()
	defer writing.Unlock()
	os.Stdout.Write(append(text, '\n'))
}

type asked struct {
	Topic       string
	Body        string
	Tags        string
	Keys        string
	Group       string
	DeliverInS  int `json:"deliver_in_s"`
	Properties  map[string]string
	Transaction string
	Many        int
}

func configuration(endpoints, group string) *rocketmq.Config {
	return &rocketmq.Config{
		Endpoint:      endpoints,
		ConsumerGroup: group,
		Credentials:   &credentials.SessionCredentials{},
	}
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func send(producer rocketmq.Producer, what asked) (line, error) {
	message := &rocketmq.Message{Topic: what.Topic, Body: []byte(what.Body)}
	if what.Tags != "" {
		message.SetTag(what.Tags)
	}
	if what.Keys != "" {
		message.SetKeys(what.Keys)
	}
	if what.Group != "" {
		message.SetMessageGroup(what.Group)
	}
	if what.DeliverInS != 0 {
		message.SetDelayTimestamp(time.Now().Add(time.Duration(what.DeliverInS) * time.Second))
	}
	for name, value := range what.Properties {
		message.AddProperty(name, value)
	}
	limit, cancel := context.WithTimeout(context.Background(), 15*time.Second)
	defer cancel()
	var receipts []*rocketmq.SendReceipt
	var err error
	if what.Transaction == "" {
		receipts, err = producer.Send(limit, message)
	} else {
		transaction := producer.BeginTransaction()
		receipts, err = producer.SendWithTransaction(limit, message, transaction)
		if err == nil && what.Transaction == "commit" {
			err = transaction.Commit()
		}
		if err == nil && what.Transaction == "rollback" {
			err = transaction.RollBack()
		}
	}
	if err != nil {
		return nil, err
	}
	return line{"message_id": receipts[0].MessageID, "offset": receipts[0].Offset}, nil
}

func sendMany(producer rocketmq.Producer, topic string, wanted int) {
	var acknowledged, number atomic.Int64
	var all sync.WaitGroup
	for range senders {
		all.Add(1)
		go func() {
			defer all.Done()
			for acknowledged.Load() < int64(wanted) {
				body := fmt.Sprintf("m%06d", number.Add(1)-1)
				answer, err := send(producer, asked{Topic: topic, Body: body, Tags: "F", Keys: body})
				if err != nil {
					put(line{"failed": body, "error": err.Error()})
					continue
				}
				acknowledged.Add(1)
				answer["acknowledged"] = body
				put(answer)
			}
		}()
	}
	all.Wait()
	put(line{"done": wanted})
}

func produce(endpoints string, topics []string) {
	checker := &rocketmq.TransactionChecker{
		Check: func(message *rocketmq.MessageView) rocketmq.TransactionResolution {
			put(line{"checked": string(message.GetBody()), "message_id": message.GetMessageId()})
			return rocketmq.COMMIT
		},
	}
	producer, err := rocketmq.NewProducer(
		configuration(endpoints, ""),
		rocketmq.WithTopics(topics...),
		rocketmq.WithTransactionChecker(checker),
	)
	check(err)
	check(producer.Start())
	put(line{"ready": true})
	input := bufio.NewScanner(os.Stdin)
	input.Buffer(nil, 1<<20)
	for input.Scan() {
		var what asked
		check(json.Unmarshal(input.Bytes(), &what))
		if what.Many > 0 {
			sendMany(producer, what.Topic, what.Many)
			continue
		}
		answer, err := send(producer, what)
		if err != nil {
			answer = line{"error": err.Error()}
		}
		put(answer)
	}
	producer.GracefulStop()
}

func text(value *string) any {
	if value == nil || *value == "" {
		return nil
	}
	return *value
}

func seen(message *rocketmq.MessageView) line {
	keys := append([]string{}, message.GetKeys()...)
	sort.Strings(keys)
	return line{
		"body":        string(message.GetBody()),
		"tags":        text(message.GetTag()),
		"keys":        keys,
		"properties":  message.GetProperties(),
		"group":       text(message.GetMessageGroup()),
		"message_id":  message.GetMessageId(),
		"attempt":     message.GetDeliveryAttempt(),
		"corrupted":   false,
		"received_ms": time.Now().UnixMilli(),
	}
}

func receive(endpoints, group, topic, expression string) {
	consumer, err := rocketmq.NewSimpleConsumer(
		configuration(endpoints, group),
		rocketmq.WithAwaitDuration(5*time.Second),
		rocketmq.WithSubscriptionExpressions(map[string]*rocketmq.FilterExpression{
			topic: rocketmq.NewFilterExpression(expression),
		}),
	)
	check(err)
	check(consumer.Start())
	put(line{"ready": true})
	var stopped atomic.Bool
	go func() {
		for input := bufio.NewScanner(os.Stdin); input.Scan(); {
		}
		stopped.Store(true)
	}()
	settle := func(message *rocketmq.MessageView) {
		var err error
		if strings.HasPrefix(string(message.GetBody()), "again") && message.GetDeliveryAttempt() == 1 {
			err = consumer.ChangeInvisibleDuration(message, time.Second)
		} else if err = consumer.Ack(context.Background(), message); err == nil {
			put(line{"settled": message.GetMessageId()})
		}
		if err != nil {
			put(line{"unsettled": message.GetMessageId(), "error": err.Error()})
		}
	}
	for !stopped.Load() {
		messages, err := consumer.Receive(context.Background(), 32, invisible)
		if err != nil {
			if !strings.Contains(err.Error(), "MESSAGE_NOT_FOUND") {
				put(line{"no_answer": err.Error()})
			}
			time.Sleep(100 * time.Millisecond)
			continue
		}
		var all sync.WaitGroup
		for _, message := range messages {
			put(seen(message))
			all.Add(1)
			go func() {
				defer all.Done()
				settle(message)
			}()
		}
		all.Wait()
	}
	consumer.GracefulStop()
}

func main() {
	arguments := os.Args[2:]
	switch os.Args[1] {
	case "produce":
		produce(arguments[0], arguments[1:])
	case "receive":
		receive(arguments[0], arguments[1], arguments[2], arguments[3])
	}
}
